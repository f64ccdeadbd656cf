"""Check in a real browser that no page of the site is wider than its window.

    python scripts/check_pages.py [FOLDER]      # default: build/site, which scripts/docs.sh makes

Loads every page in windows of 390 and 1300 px, in about ten seconds. The browser is $HOT_BROWSER
or a Chromium on the PATH. Without a browser the check says so and passes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SECONDS = 300
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
  await fetch("/measured", {method: "POST", body: JSON.stringify(rows)});
})();
</script>"""


def measure(site: Path, browser: str) -> list[tuple[str, int, int]]:
    """Return page, width of the window and width of the content for every page and window."""
    rows: list[tuple[str, int, int]] = []
    measured = threading.Event()
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(site))

        def do_GET(self) -> None:
            if self.path != "/measure":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(SCRIPT.replace("PAGES", json.dumps(pages)).encode())

        def do_POST(self) -> None:
            rows.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()
            measured.set()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--remote-debugging-port=0"]
        options += [f"--user-data-dir={profile}", f"http://127.0.0.1:{server.server_port}/measure"]
        with subprocess.Popen([browser, *options], stderr=subprocess.DEVNULL) as process:
            measured.wait(SECONDS)
            process.terminate()
    server.shutdown()
    return rows


def main() -> int:
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "build/site").resolve()
    browser = os.environ.get("HOT_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"check_pages: skipped; found no browser ({', '.join(BROWSERS)}, or HOT_BROWSER)")
        return 0
    rows = measure(site, browser)
    wide = [row for row in rows if row[2] > row[1]]
    for page, width, content in wide:
        print(f"check_pages: {page} is {content} px wide in a window of {width} px")
    print(f"check_pages: {len(rows)} pages by width measured, {len(wide)} too wide")
    return int(bool(wide) or not rows)


if __name__ == "__main__":
    sys.exit(main())
