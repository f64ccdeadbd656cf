#!/usr/bin/env bash
# Unpacks packages of a Debian release into a folder: libraries or a Python of another release or processor. Nothing is
# installed, no dependency is followed, and a folder that is there is taken as it is.
#
#   bash scripts/debian_root.sh FOLDER SUITE ARCHITECTURE PACKAGE...     SUITE: bullseye, sid, ...; amd64, arm64, ...
#
# HOT_DEBIAN_SECTIONS: other sections of the archive than "main".
set -euo pipefail
[[ $# -ge 4 && "$1" != -* ]] || { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | sed '/^set /d'; exit 2; }
folder="$1" suite="$2" architecture="$3"
shift 3
[[ ! -d "$folder" ]] || exit 0
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[[ -f "$keys" ]] || { echo "debian_root: error: no $keys: this works on Debian (package debian-archive-keyring)" >&2; exit 1; }
state="$(realpath -m "$folder.apt")"
rm -rf "$state" "$folder.part"
mkdir -p "$state/lists/partial" "$state/fetched"
echo "deb [signed-by=$keys] http://deb.debian.org/debian $suite ${HOT_DEBIAN_SECTIONS:-main}" >"$state/sources.list"
apt=(apt-get -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null
  -o Dir::State::lists="$state/lists" -o Dir::Cache="$state" -o Dir::State::status=/dev/null
  -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" -o APT::Sandbox::User=root)
"${apt[@]}" update >&2
(cd "$state/fetched" && "${apt[@]}" download "$@" >&2)
for file in "$state/fetched"/*.deb; do dpkg-deb -x "$file" "$folder.part"; done
# Releases keep their libraries in /lib or in /usr/lib; and absolute links would lead out of the folder.
for name in lib lib64; do
  [[ -e "$folder.part/$name" || ! -e "$folder.part/usr/$name" ]] || ln -s "usr/$name" "$folder.part/$name"
done
find "$folder.part" -type l -lname '/*' | while read -r link; do
  ln -sfn "$(realpath -m "$folder")$(readlink "$link")" "$link"
done
rm -rf "$state"
mv "$folder.part" "$folder"
