"""Check in a real browser that no page of the site is wider than its window.

    python scripts/check_pages.py [FOLDER]      # default: build/site, which scripts/docs.sh makes

Loads every page in windows of 390 and 1300 px, in about twenty seconds. The browser is $HOT_BROWSER
or a Chromium on the PATH. Without a browser the check says so and passes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# The last two options let the script below read pages of other files.
OPTIONS = ("--headless", "--no-sandbox", "--virtual-time-budget=1000000000", "--dump-dom",
           "--allow-file-access-from-files", "--disable-web-security")  # fmt: skip
SCRIPT = """<body><script>
const load = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.style = `width: ${width}px; height: 800px; border: 0`;
  frame.onload = () => {
    done([page, width, frame.contentDocument.documentElement.scrollWidth]);
    frame.remove();
  };
  frame.src = page;
  document.body.append(frame);
});
(async () => {
  const rows = [];
  for (const page of PAGES) for (const width of [390, 1300]) rows.push(await load(page, width));
  document.body.innerText = JSON.stringify(rows);
})();
</script>"""


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").resolve()
    browser = os.environ.get("HOT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"check_pages: skipped, no browser ({', '.join(BROWSERS)}, or HOT_BROWSER)")
        return 0
    pages = [path.as_uri() for path in sorted(site.rglob("*.html"))]
    with tempfile.NamedTemporaryFile("w", suffix=".html") as script:
        script.write(SCRIPT.replace("PAGES", json.dumps(pages)))
        script.flush()
        command = [browser, *OPTIONS, Path(script.name).as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    text = re.search(r"\[\[.*\]\]", done.stdout)
    rows = json.loads(text[0]) if text else []
    if not pages or len(rows) != 2 * len(pages):
        sys.exit(f"check_pages: {browser} measured {len(rows)} of {2 * len(pages)} windows")
    wide = [row for row in rows if row[2] > row[1]]
    for page, width, content in wide:
        print(f"check_pages: {page} is {content} px wide in a window of {width} px")
    print(f"check_pages: {len(pages)} pages measured, {len(wide)} windows too narrow")
    return int(bool(wide))


if __name__ == "__main__":
    sys.exit(main())
