# sh progress.sh COMMAND... runs one compilation of a build by Ninja, in the build folder. It reports
# the progress on the terminal, ten times per build (HotSummary.cmake).
"$@" || exit
echo >>compiled
done=$(wc -l <compiled)
all=$(grep -c '^build .*: C[A-Z]*_COMPILER' build.ninja)
if [ $((10 * done / all)) -ne $((10 * (done - 1) / all)) ]; then
  trap '' TTOU
  printf '\nhotcore: %s of %s files compiled\n' "$done" "$all" 2>/dev/null >/dev/tty
fi
exit 0
