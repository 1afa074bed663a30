#!/bin/sh
# Makes, in the current folder, what the examples with TLS need, good for 30 days: a CA (ca.crt),
# a certificate for 127.0.0.1, localhost and *.example.test (server.crt, server.key), and one for a
# client (client.crt, client.key). For trying out only: the keys are not protected.
set -eu

make() {
  name=$1
  shift
  openssl req -x509 -newkey rsa:2048 -nodes -days 30 -subj "/O=Example/CN=$name" \
    -keyout "$name.key" -out "$name.crt" "$@"
}

issue() {
  make "$@" -CA ca.crt -CAkey ca.key -addext basicConstraints=critical,CA:FALSE
}

umask 077
make ca
issue server -addext 'subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:*.example.test'
issue client -addext extendedKeyUsage=clientAuth
