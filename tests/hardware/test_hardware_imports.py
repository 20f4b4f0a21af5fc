"""The hardware package is importable where nothing but Python is installed."""

import subprocess
import sys


def test_only_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = set(sys.modules); import vidur_ppo_plugin.hardware\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names) - {'vidur_ppo_plugin'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
