#!/usr/bin/env bash
# Makes every secret that docker-compose.yml names, once: what is there stays. Usage: deploy/secrets.sh [DIRECTORY [NAME…]]
# NAME… are the names and addresses that the proxy's own certificate is for; put a certificate of your CA (certificate chain and
# private key in one PEM file) in its place. The directory is for its owner alone; the files are readable for the containers' users.
set -euo pipefail
directory=${1:-$(dirname "$0")/secrets}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(localhost 127.0.0.1)
subnet=${EVERSTEP_SUBNET:-172.30.0.0/24} # where Ray's nodes have their addresses, as in docker-compose.yml
[[ $subnet == *.0/24 ]] || { echo "EVERSTEP_SUBNET must end in .0/24, it is $subnet" >&2; exit 1; }
umask 077
mkdir -p "$directory"
cd "$directory"

# keep NAME: takes stdin as the secret NAME, unless there is one
keep() {
    if [ ! -s "$1" ]; then
        cat >"$1.new"
        chmod 444 "$1.new"
        mv "$1.new" "$1"
    else
        cat >/dev/null
    fi
}
random() { openssl rand -hex 32; }
line() { printf '%s' "$1"; }

random | keep ray_token
line everstep | keep storage_user
random | tr -d '\n' | keep storage_password
printf '[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n' "$(cat storage_user)" "$(cat storage_password)" |
    keep storage_credentials
random | tr -d '\n' | keep database_password
line "postgresql+psycopg://everstep:$(cat database_password)@database/everstep" | keep database_url
line "evs_$(random)" | keep metrics_token
random | tr -d '\n' | keep grafana_password
# self_signed DAYS NAME…: makes key.pem and certificate.pem, for these names and addresses
self_signed() {
    local alternatives="" name
    for name in "${@:2}"; do
        case $name in *[!0-9.]*) alternatives+=",DNS:$name" ;; *) alternatives+=",IP:$name" ;; esac
    done
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days "$1" -subj "/CN=$2" \
        -addext "subjectAltName=${alternatives#,}" -keyout key.pem -out certificate.pem 2>/dev/null
}
if [ ! -s tls_certificate ]; then
    self_signed 825 "${names[@]}"
    cat certificate.pem key.pem | keep tls_certificate
fi
# Ray's nodes have one certificate together, for every address that one of them may have: with its key they prove to each other that
# they belong to the cluster, and it is its own authority. Delete both files for a new one.
if [ ! -s ray_certificate ] || [ ! -s ray_key ]; then
    rm -f ray_certificate ray_key
    mapfile -t addresses < <(seq -f "${subnet%.*}.%g" 254)
    self_signed 3650 head localhost 127.0.0.1 "${addresses[@]}"
    keep ray_certificate <certificate.pem
    keep ray_key <key.pem
fi
rm -f key.pem certificate.pem
# What specs name as secrets (docs/operations.md): files of this directory, on every host that runs workers.
mkdir -p run
chmod 755 run
