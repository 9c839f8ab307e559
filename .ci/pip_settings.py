"""Copy this machine's settings of pip into a root file system; print the volumes they need.

`python3 .ci/pip_settings.py ROOT` writes ROOT/etc/pip.conf and the files that it names, such as a
certificate.
"""

import ast
import shutil
import subprocess
import sys
from pathlib import Path


def settings() -> dict[str, str]:
    """Return pip's settings. Those of the environment win over those of files."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    found = {}
    for line in sorted(listing, key=lambda line: line.startswith(":env:")):
        key, value = line.split("=", 1)
        found[key.rpartition(".")[2]] = ast.literal_eval(value)
    return found


def main(root: Path) -> None:
    """Write the settings below `root`; print buildah's options for the folders they name."""
    found = settings()
    if "cert" in found:
        shutil.copyfile(found["cert"], root / "etc/pip_certificate.pem")
        found["cert"] = "/etc/pip_certificate.pem"
    lines = [f"{key} = {' '.join(value.split())}" for key, value in found.items()]
    (root / "etc/pip.conf").write_text("\n".join(["[global]", *lines, ""]))
    words = (word.removeprefix("file://") for value in found.values() for word in value.split())
    places = [Path(word) for word in words if word.startswith("/")]
    for place in places:
        inside = root / place.relative_to("/")
        if place.is_file() and not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place, inside)
    # An index in a folder "simple" links to files in the parent folder.
    folders = {place.parent if place.name == "simple" else place for place in places}
    volumes = [f"--volume={folder}:{folder}:ro" for folder in sorted(folders) if folder.is_dir()]
    sys.stdout.write(" ".join(volumes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
