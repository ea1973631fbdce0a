#!/usr/bin/env bash
# Makes the base images of the compose file where no image registry can be reached: Debian's packages by mmdebstrap.
# base_images.sh FOLDER; DOCKER_HOST says which daemon. Prints the variables that name them. What is there already stays.
set -euo pipefail
folder=${1:?usage: base_images.sh FOLDER}
mkdir -p "$folder"
prefix=treadle-base

make_image() { # NAME VARIANT PACKAGES
  docker image inspect "$prefix/$1" >/dev/null 2>&1 && return
  # The machine's own certificates, so that pip in a build trusts whom the machine trusts.
  # The hook: as in Debian's own images, without 45 MB of Perl that move files to /usr.
  mmdebstrap --quiet --variant="$2" --include="$3" --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
    --customize-hook='mkdir -p "$1/etc/ssl/certs" && cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    bookworm "$folder/$1.tar" >&2
  docker import --change 'ENV LANG=C.UTF-8' "$folder/$1.tar" "$prefix/$1" >/dev/null
  rm "$folder/$1.tar"
}

# As python3-debian12 of distroless: Python with its standard library and what that needs, and no shell.
python=python3.11-minimal,libpython3.11-minimal,libpython3.11-stdlib,libc6,libgcc-s1,libstdc++6,zlib1g,libssl3,libexpat1,libffi8,liblzma5
python=$python,libbz2-1.0,libsqlite3-0,libuuid1,libncursesw6,libtinfo6,libreadline8,libdb5.3,libnsl2,libtirpc3,libcrypt1,media-types,tzdata
make_image build minbase python3-venv,python3-dev,g++,libc6-dev,ca-certificates
make_image tools minbase python3,bubblewrap
make_image service extract "$python,python3-minimal,base-files,netbase"
make_image engine minbase python3-venv,python3-dev,g++,curl,util-linux,ca-certificates

if ! docker image inspect "$prefix/nats" >/dev/null 2>&1; then
  context=$(mktemp -d)
  cp "$(command -v nats-server)" "$context/nats-server"
  printf 'FROM %s\nCOPY nats-server /usr/local/bin/\nENTRYPOINT ["nats-server"]\n' "$prefix/nats-base" >"$context/Dockerfile"
  make_image nats-base minbase wget
  docker build -q -t "$prefix/nats" "$context" >/dev/null
  rm -r "$context"
fi
echo "BUILD_IMAGE=$prefix/build SERVICE_IMAGE=$prefix/service TOOLS_IMAGE=$prefix/tools ENGINE_IMAGE=$prefix/engine NATS_IMAGE=$prefix/nats TORCH_FROM_PYPI=1"
