"""Shows the notebooks of examples/notebooks, with their stored outputs, as pages of the site."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
FOLDER = "tutorials"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        assets: dict[str, bytes] = {path.name: path.read_bytes()}
        content = "\n\n".join(page(path, assets))
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=content))
        for name, file in assets.items():
            files.append(File.generated(config, f"{FOLDER}/{name}", content=file))
    return files


def page(path: Path, assets: dict[str, bytes]) -> Iterator[str]:
    """The Markdown of a notebook's cells and outputs; pictures are added to `assets`."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}-{len(assets)}.png"
                assets[name] = b64decode(data["image/png"])
                yield f"![{cell['metadata']['alt']}]({name})"
            elif "text/html" in data:
                yield joined(data["text/html"])
            else:
                yield f'``` {{.text title="Output"}}\n{joined(data["text/plain"]).rstrip()}\n```'
    yield f"[Download this notebook]({path.name}) to run it yourself."


def joined(text: Any) -> str:
    """A text as notebooks have it: one string, or a list of lines."""
    return text if isinstance(text, str) else "".join(text)
