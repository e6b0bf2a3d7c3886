#!/usr/bin/env bash
# secrets.sh FOLDER: makes what is not in FOLDER yet (an authority, a certificate for each role, the fleet's token, a
# token for a first tenant), and prints it as Secrets:
#   deploy/kubernetes/secrets.sh secrets | kubectl apply -n outrider -f -
# FOLDER holds the authority's key: keep it where nobody else reads. A certificate whose files are removed is made anew;
# pods read them again by themselves. With cert-manager let it fill the same Secrets instead (tls.crt, tls.key, ca.crt).
set -euo pipefail
folder=${1:?usage: secrets.sh FOLDER}
tenant=${TENANT:-default}
days=${DAYS:-90}
umask 077
mkdir -p "$folder"
cd "$folder"

if [[ ! -e ca.key ]]; then
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 3650 -subj "/CN=outrider fleet" \
        -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign" \
        -keyout ca.key -out ca.crt 2>/dev/null
fi

# Roles name themselves; those that clients dial have the names that they use, too.
declare -A names=(
    [coordinator]="DNS:coordinator,DNS:coordinator.outrider,DNS:coordinator.outrider.svc,DNS:outrider,DNS:outrider.outrider,DNS:outrider.outrider.svc,DNS:localhost,IP:127.0.0.1"
    [gateway]="DNS:gateway,DNS:gateway.outrider,DNS:gateway.outrider.svc,DNS:localhost,IP:127.0.0.1"
    [draft-worker]="DNS:draft-worker"
    [target-worker]="DNS:target-worker"
)
for role in coordinator gateway draft-worker target-worker; do
    [[ -e $role.crt ]] && continue
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj "/CN=$role" \
        -keyout "$role.key" -out "$role.csr" 2>/dev/null
    openssl x509 -req -in "$role.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days "$days" -out "$role.crt" \
        -extfile <(printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth,clientAuth\n' "${names[$role]}") 2>/dev/null
    rm "$role.csr"
done

[[ -e fleet-token ]] || echo "outrider_$(openssl rand -hex 32)" >fleet-token
if [[ ! -e tokens ]]; then
    printf 'outrider_%s\n' "$(openssl rand -hex 32)" >token
    printf 'sha256:%s %s\n' "$(tr -d '\n' <token | openssl dgst -sha256 -r | cut -d' ' -f1)" "$tenant" >tokens
    echo "token of tenant $tenant: $folder/token" >&2
fi

secret() {
    local name=$1
    shift
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata:\n  name: %s\ntype: Opaque\ndata:\n' "$name"
    for entry in "$@"; do
        printf '  %s: %s\n' "${entry%%=*}" "$(base64 -w 0 <"${entry#*=}")"
    done
}
for role in coordinator gateway draft-worker target-worker; do
    secret "$role-tls" tls.crt="$role.crt" tls.key="$role.key" ca.crt=ca.crt
done
secret tokens tokens=tokens
secret fleet-token token=fleet-token
