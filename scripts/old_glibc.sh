#!/usr/bin/env bash
# Makes a C++ compiler whose programs run on glibc 2.28, for wheels without containers (scripts/release.py). It has this
# machine's g++ with the headers and libraries of Debian 11. Nothing is installed.
#
#   bash scripts/old_glibc.sh FOLDER [aarch64]       prints FOLDER/c++, the compiler; aarch64: by aarch64-linux-gnu-g++
#
# Debian 11 has glibc 2.31, but auditwheel checks that libhot uses no symbol above 2.28. Debian 11's libstdc++ is newer
# than manylinux_2_28's, so it is linked statically. The C++ interface stays g++'s, so that find_package(hotcore) works
# with the wheel. A cross compiler has its own C library, so these folders come before it.
set -euo pipefail
[[ $# -ge 1 && "$1" != -* && "${2:-aarch64}" == aarch64 ]] ||
  { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 2; }
mkdir -p "$1"
folder="$(cd "$1" && pwd)"
architecture=amd64 triple=x86_64-linux-gnu gxx=g++
[[ $# -eq 1 ]] || { architecture=arm64 triple=aarch64-linux-gnu gxx=aarch64-linux-gnu-g++; }

if [[ ! -x "$folder/c++" ]]; then
  bash "$(dirname "${BASH_SOURCE[0]}")/debian_root.sh" "$folder/root" bullseye "$architecture" libc6 libc6-dev libcrypt1 \
    libcrypt-dev linux-libc-dev libgcc-s1 libstdc++6 libstdc++-10-dev libgcc-10-dev
  libraries="usr/lib/$triple"
  cat >"$folder/c++.part" <<COMPILER
#!/bin/sh
# Made by scripts/old_glibc.sh.
root="$folder/root"
exec $gxx --sysroot="\$root" -nostdinc++ -isystem "\$root/usr/include/c++/10" \\
  -isystem "\$root/usr/include/$triple/c++/10" -isystem "\$root/usr/include/$triple" -isystem "\$root/usr/include" \\
  -B"\$root/$libraries" -L"\$root/$libraries" -L"\$root/lib/$triple" -L"\$root/usr/lib/gcc/$triple/10" \\
  -static-libstdc++ -pthread "\$@"
COMPILER
  chmod +x "$folder/c++.part"
  mv "$folder/c++.part" "$folder/c++"
fi
printf 'int main() {}\n' | "$folder/c++" -x c++ - -o "$folder/probe"
[[ $# -eq 2 ]] || "$folder/probe"
printf '%s\n' "$folder/c++"
