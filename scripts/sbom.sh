#!/usr/bin/env bash
# Write the bill of materials of everything that constraints.txt pins, as CycloneDX JSON: scripts/sbom.sh PYTHON FILE
# Its tool gets an environment of its own beside the file (scripts/sbom.txt says why).
set -euo pipefail
mkdir -p "$(dirname "$2")"
tool=$(dirname "$2")/sbom-venv
"$1" -m venv --clear "$tool"
"$tool/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement scripts/sbom.txt
"$tool/bin/python" -m cyclonedx_py requirements constraints.txt --pyproject pyproject.toml --mc-type application --output-reproducible \
    --output-format JSON --output-file "$2"
echo "$2: $("$1" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["components"]))' "$2") components"
