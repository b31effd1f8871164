#!/bin/sh
# serve.sh server DIRECTORY --address :PORT, as MinIO is called, by SeaweedFS
set -eu
umask 077
cat >/tmp/s3.json <<JSON
{"identities": [{"name": "root", "actions": ["Admin", "Read", "Write", "List", "Tagging"], "credentials": [
  {"accessKey": "$(cat "$MINIO_ROOT_USER_FILE")", "secretKey": "$(cat "$MINIO_ROOT_PASSWORD_FILE")"}]}]}
JSON
exec weed -logtostderr=true server -dir="$2" -ip=127.0.0.1 -ip.bind=0.0.0.0 \
    -master.volumeSizeLimitMB=256 -volume.max=100 -filer -s3 -s3.port="${4#:}" -s3.config=/tmp/s3.json
