#!/usr/bin/env bash
# Write the bill of materials of everything that constraints.txt pins, as CycloneDX JSON: scripts/sbom.sh PYTHON FILE
set -euo pipefail
mkdir -p "$(dirname "$2")"
"$1" -m cyclonedx_py requirements constraints.txt --pyproject pyproject.toml --mc-type application --output-reproducible \
    --output-format JSON --output-file "$2"
echo "$2: $("$1" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["components"]))' "$2") components"
