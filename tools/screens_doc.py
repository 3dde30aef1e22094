"""Makes the pictures of the page in docs/screens/ anew: runs the browser's tests, and takes what they kept.

Needs Chromium and chromedriver. A picture that no test keeps any more is removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
KEPT: Final = ROOT / "build" / "screens" / "docs"
SHOWN: Final = ROOT / "docs" / "screens"
TEST: Final = "tests/integration/test_web_faults_browser.py"


def main() -> None:
    """Run the tests and copy the pictures; nothing is changed if a test fails or is skipped."""
    shutil.rmtree(KEPT, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "pytest", "-q", TEST], cwd=ROOT, check=True)
    made = sorted(KEPT.glob("*.webp")) if KEPT.is_dir() else []
    if not made:
        raise SystemExit(f"{TEST} kept no picture in {KEPT}: are Chromium and chromedriver installed?")
    shutil.rmtree(SHOWN, ignore_errors=True)
    SHOWN.mkdir()
    for picture in made:
        shutil.copy(picture, SHOWN)


if __name__ == "__main__":
    main()
