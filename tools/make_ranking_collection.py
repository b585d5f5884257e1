"""Writes tests/data/ranking.json: passages of Python's language reference, and queries, for tests/parity/test_default_embedder.py.

Run it only to replace the collection: `python tools/make_ranking_collection.py`. The result is that of the Python that
runs (3.11.7 in the repository), and of weft's splitter. Its licence is beside it, in ranking-licence.txt.
"""

from __future__ import annotations

import builtins
import inspect
import json
import platform
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from weft.memory.documents import ChunkSize
from weft.memory.reading import read_markdown
from weft.memory.splitting import split

FOLDER = Path(__file__).parents[1] / "tests" / "data"
LEAST_WORDS_OF_PASSAGE, LEAST_WORDS_OF_QUERY = 8, 4
OWNERS = (builtins, str, list, dict, set, int, bytes, float)


def passages() -> list[str]:
    """The topics of `help()`, which are sections of the language reference, split as by the server."""
    found = {
        passage.searched_text
        for text in topics.values()
        for passage in split(read_markdown(text), ChunkSize(400, 0), {})
        if len(passage.text.split()) >= LEAST_WORDS_OF_PASSAGE
    }
    return sorted(found)


def queries() -> list[str]:
    """The first paragraphs of the documentation of built-in functions and methods."""
    documented = (
        inspect.getdoc(getattr(owner, name)) or ""
        for owner in OWNERS
        for name in dir(owner)
        if callable(getattr(owner, name))
    )
    asked = {" ".join(text.split("\n\n")[0].split()) for text in documented}
    return sorted(text for text in asked if len(text.split()) >= LEAST_WORDS_OF_QUERY)


def main() -> None:
    collection = {
        "source": f"the documentation of Python {platform.python_version()}",
        "licence": "ranking-licence.txt",
        "passages": passages(),
        "queries": queries(),
    }
    (FOLDER / "ranking.json").write_text(
        json.dumps(collection, ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
    )
    licence = Path(sysconfig.get_path("stdlib"), "LICENSE.txt").read_text(encoding="utf-8")
    (FOLDER / "ranking-licence.txt").write_text(licence, encoding="utf-8")


if __name__ == "__main__":
    main()
