"""Makes the folder of attack files anew: `python -m tests.attacks.make_attacks [DIRECTORY]`.

The same bytes every time; a test compares them with what is checked in.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.attacks.bases import all_bases
from tests.attacks.dcp_attacks import dcp_attacks
from tests.attacks.huggingface_attacks import huggingface_attacks
from tests.attacks.manifest import BASE, FILES, FOLDER, write_folder
from tests.attacks.message_attacks import message_attacks
from tests.attacks.torch_attacks import torch_attacks


def make_folder(folder: Path) -> None:
    """Write everything."""
    bases = all_bases()
    attacks = [
        *dcp_attacks(bases["dcp"]),
        *huggingface_attacks(bases["huggingface"]),
        *torch_attacks(),
        *message_attacks(),
    ]
    for name in (BASE, FILES):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_folder(folder, bases, attacks)


if __name__ == "__main__":
    make_folder(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
