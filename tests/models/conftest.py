"""One directory of tiny checkpoints for the whole session, and copies of them to spoil."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def edit(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a single-file checkpoint with its tensors or its config changed."""

    def edit(source: Path, change: Callable[[dict[str, Tensor]], object] | None = None, **config: Any) -> Path:
        target = tmp_path / f"edited-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(source, target)
        if change is not None:
            tensors = load_file(target / "model.safetensors")
            change(tensors)
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        text = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps({**text, **config}))
        return target

    return edit
