"""Credit can be had where there is no torch and no Vidur: in the environment and in training workers."""

import subprocess
import sys

from packaging_tools import PACKAGE, ROOT


def test_neither_torch_nor_vidur_is_imported() -> None:
    modules = sorted(path.stem for path in (ROOT / PACKAGE / "learn" / "credit").glob("*.py"))
    imports = "; ".join(f"import {PACKAGE}.learn.credit.{name}" for name in modules if name != "__init__")
    code = f"{imports}\nimport sys; print(sorted({{'torch', 'vidur'}} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
