"""Packaging, and the one unusual thing about it: two start-up files beside the package.

Vidur has no plugin loading. `vidur_ppo_plugin.pth` in site-packages installs an import hook in every
interpreter (see `vidur_ppo_plugin/_autoload.py`); `vidur_ppo_plugin.start` is the same for Python 3.15
and later (PEP 829). They must land in the root of site-packages for wheels, plain installs and editable
installs alike, and be listed in RECORD so that uninstalling removes them.
"""

import base64
import hashlib
import os
import runpy
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).parent

AUTOLOAD = runpy.run_path(str(ROOT / "vidur_ppo_plugin" / "_autoload.py"))  # standard library only

# One line, because `site` executes .pth files line by line. It must never disturb an unrelated process, so
# every error is dropped there; but a `vidur.main` run that asks for one of our names must not go on without
# them: Vidur would silently run round_robin. os._exit, since SystemExit inside `site` prints a fatal error. The
# globals of its own, because `site` executes it inside a function, where a generator would not see `n`.
# In a virtual environment `site` reads the file twice (lib and lib64): the second time there is nothing to do.
START_UP_FILES = {
    "vidur_ppo_plugin.pth": (
        "import sys; 'vidur_ppo_plugin._autoload' in sys.modules or "
        'exec("try:\\n'
        " import vidur_ppo_plugin._autoload as a; a.install()\\n"
        "except Exception as e:\\n"
        " v = getattr(sys, 'orig_argv', [])\\n"
        f" n = {sorted(AUTOLOAD['own_types']())!r}\\n"
        " if 'vidur.main' in v and any(x.split('=')[-1].lower() in n for x in v):\\n"
        "  import os; sys.stderr.write('error: vidur-ppo-plugin is installed but failed to load: %r\\\\n' % e)\\n"
        '  sys.stderr.flush(); os._exit(2)", {"sys": sys})\n'
    ),
    "vidur_ppo_plugin.start": "vidur_ppo_plugin._autoload:install\n",
}


class BuildPy(build_py):
    """Adds the start-up files to the root of a built wheel, and the scenarios to the package.

    Not in editable mode: there EditableWheel adds the former, and the scenarios are read from `configs/`.
    """

    def _added_paths(self) -> dict:
        if self.editable_mode:
            return {}
        files = dict(START_UP_FILES)
        for path in sorted((ROOT / "configs" / "scenarios").glob("*.yaml")):
            files[os.path.join("vidur_ppo_plugin", "scenarios", path.name)] = path.read_text(encoding="utf-8")
        return {os.path.join(self.build_lib, name): text for name, text in files.items()}

    def run(self) -> None:
        super().run()
        for path, text in self._added_paths().items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")

    def get_outputs(self, include_bytecode: bool = True) -> list:
        return [*super().get_outputs(include_bytecode), *self._added_paths()]


class EditableWheel(editable_wheel):
    """Appends the start-up files to the editable wheel that setuptools built, and to its RECORD."""

    def run(self) -> None:
        super().run()
        # `dist_dir` may hold other wheels; the newest is the one just built.
        wheels = sorted(Path(self.dist_dir).glob("*.whl"), key=lambda p: p.stat().st_mtime)
        add_to_wheel(wheels[-1], START_UP_FILES)


def add_to_wheel(wheel: Path, files: dict) -> None:
    """Rewrites `wheel` with `files` added at its root and listed in RECORD with their hashes."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for info, data in entries:
            if info.filename.endswith(".dist-info/RECORD"):
                data += "".join(record_line(name, text) for name, text in files.items()).encode()
            archive.writestr(info, data)
        for name, text in files.items():
            archive.writestr(name, text)


def record_line(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(text.encode())}\n"


def read_version() -> str:
    for line in (ROOT / "vidur_ppo_plugin" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("vidur_ppo_plugin/__init__.py has no __version__")


#: The policies that come with the package.
PRETRAINED = ["pretrained/*.ckpt", "pretrained/*.npz", "pretrained/*.json"]
RL = ["stable-baselines3>=2.4"]
SERVE = [
    "uvicorn>=0.30",
    "httptools>=0.6.1",
    "uvloop>=0.19; sys_platform != 'win32'",
    "aiohttp>=3.10",
    "prometheus-client>=0.20",
]
TEST = [
    "pytest>=7.4",
    "pytest-xdist>=3.5",
    "hypothesis>=6.90",
    "playwright>=1.40",
    "setuptools>=64",
    "wheel>=0.40",
    "tensorboard>=2.15",
    "wandb-workspaces>=0.4",
    *RL,
    *SERVE,
]

setup(
    name="vidur-ppo-plugin",
    version=read_version(),
    description="A PPO-trained global scheduler, honest baselines and an offline predictor for the Vidur simulator",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    # Makes editable installs a plain path entry; setuptools would otherwise add an import finder to every start.
    package_dir={"": "."},
    packages=find_packages(include=["vidur_ppo_plugin", "vidur_ppo_plugin.*"]),
    package_data={"vidur_ppo_plugin": ["py.typed", "*.yaml", "compare/assets/*", *PRETRAINED]},
    # PyPI's vidur has breaking changes between releases: this range is the one we test.
    install_requires=[
        "vidur>=0.0.26,<0.0.27",
        "torch>=2.2",
        "numpy>=1.26",
        "numba>=0.60",
        "scipy>=1.11",
        "threadpoolctl>=3.1",
        "gymnasium>=1.0",
        "pandas>=2.0",
        "pyarrow>=14",
        "rich>=13",
        "matplotlib>=3.8",
        "Jinja2>=3.1",
        "simple-parsing>=0.1.5",
        "PyYAML>=6.0",
        "packaging>=22",
        "wandb>=0.16",
        # Vidur's default flags draw plots: plotly 7 and kaleido 1 need Chrome for that, these do not.
        "plotly>=5,<7",
        "kaleido>=0.2.1,<1",
    ],
    extras_require={
        "dashboard": ["wandb-workspaces>=0.4"],
        "test": TEST,
        "dev": [*TEST, "ruff>=0.6", "mypy>=1.8", "types-PyYAML", "build>=1.0"],
        "rl": RL,
        "ray": ["ray[default,tune]>=2.9"],
        "serve": SERVE,
        "tensorboard": ["tensorboard>=2.15"],
    },
    entry_points={
        "console_scripts": ["vidur-ppo = vidur_ppo_plugin.cli:main"],
        "vidur.plugins": ["vidur_ppo = vidur_ppo_plugin.plugin:register"],
    },
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
    classifiers=[
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
