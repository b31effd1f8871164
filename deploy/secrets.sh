#!/usr/bin/env bash
# Makes every secret that docker-compose.yml names, once: what is there stays. Usage: deploy/secrets.sh [DIRECTORY [NAME…]]
# NAME… are the names and addresses that the proxy's own certificate is for; put a certificate of your CA (certificate chain and
# private key in one PEM file) in its place. The directory is for its owner alone; the files are readable for the containers' users.
set -euo pipefail
directory=${1:-$(dirname "$0")/secrets}
names=("${@:2}")
[ ${#names[@]} -gt 0 ] || names=(localhost 127.0.0.1)
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
if [ ! -s tls_certificate ]; then
    alternatives=""
    for name in "${names[@]}"; do
        case $name in *[!0-9.]*) kind=DNS ;; *) kind=IP ;; esac
        alternatives+="${alternatives:+,}$kind:$name"
    done
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 825 -subj "/CN=${names[0]}" \
        -addext "subjectAltName=$alternatives" -keyout key.pem -out certificate.pem 2>/dev/null
    cat certificate.pem key.pem | keep tls_certificate
    rm key.pem certificate.pem
fi
# What specs name as secrets (docs/operations.md): files of this directory, on every host that runs workers.
mkdir -p run
chmod 755 run
