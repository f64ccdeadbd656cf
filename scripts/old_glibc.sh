#!/usr/bin/env bash
# Makes a C++ compiler whose programs run on glibc 2.28, out of this machine's g++ and the headers and libraries of
# Debian 11: for wheels on a Debian machine without containers (scripts/release.py). Nothing is installed.
#
#   bash scripts/old_glibc.sh FOLDER       prints FOLDER/c++, the compiler
#
# Debian 11 has glibc 2.31; what libhot uses of it is older than 2.28, and auditwheel says whether that is so. libstdc++
# is linked statically: that of Debian 11 is newer than manylinux_2_28's. The C++ interface stays g++'s, so that
# find_package(hotcore) works out of the wheel (a clang with libc++ would change it).
set -euo pipefail
[[ $# -eq 1 && "$1" != -* ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 2; }
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
packages=(libc6 libc6-dev libcrypt1 libcrypt-dev linux-libc-dev libgcc-s1 libstdc++6 libstdc++-10-dev libgcc-10-dev)
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -f "$keys" ]] || { echo "old_glibc: error: no $keys: this works on Debian (package debian-archive-keyring)" >&2; exit 1; }

if [[ ! -x "$folder/c++" ]]; then
  state="$folder/apt"
  mkdir -p "$state/lists/partial" "$state/fetched"
  echo "deb [signed-by=$keys] http://deb.debian.org/debian bullseye main" >"$state/sources.list"
  apt=(apt-get -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::State::lists="$state/lists" -o Dir::Cache="$state" -o Dir::State::status=/dev/null
    -o APT::Sandbox::User=root)
  "${apt[@]}" update >&2
  (cd "$state/fetched" && rm -f ./*.deb && "${apt[@]}" download "${packages[@]}" >&2)
  for file in "$state/fetched"/*.deb; do dpkg-deb -x "$file" "$folder/root"; done
  # Debian 11 keeps some in /lib; and absolute links would lead out of the folder.
  find "$folder/root" -type l -lname '/*' | while read -r link; do ln -sfn "$folder/root$(readlink "$link")" "$link"; done
  libraries="usr/lib/x86_64-linux-gnu"
  cat >"$folder/c++.part" <<COMPILER
#!/bin/sh
# Made by scripts/old_glibc.sh.
root="$folder/root"
exec g++ --sysroot="\$root" -nostdinc++ -isystem "\$root/usr/include/c++/10" \\
  -isystem "\$root/usr/include/x86_64-linux-gnu/c++/10" -B"\$root/$libraries" -L"\$root/$libraries" \\
  -L"\$root/lib/x86_64-linux-gnu" -L"\$root/usr/lib/gcc/x86_64-linux-gnu/10" -static-libstdc++ -pthread "\$@"
COMPILER
  chmod +x "$folder/c++.part"
  mv "$folder/c++.part" "$folder/c++"
fi
printf 'int main() {}\n' | "$folder/c++" -x c++ - -o "$folder/probe" && "$folder/probe"
printf '%s\n' "$folder/c++"
