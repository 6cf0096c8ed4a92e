"""Check that docs/architecture.md lists the rooms that the linter enforces."""

from __future__ import annotations

import rooms


def test_the_map_of_rooms_equals_the_import_contract() -> None:
    page = rooms.PAGE.read_text()
    assert rooms.files()[rooms.PAGE] == page, "run `python docs/scripts/write.py`"
    for layer in rooms.layers():
        for room in layer:
            assert f"`{room}`" in page


def test_every_room_says_what_it_does() -> None:
    names = [room for layer in rooms.layers() for room in layer]
    assert {"graph", "sparsity", "splice", "runtime"} <= set(names)
    for room in names:
        assert rooms.purpose(room).endswith((".", ":")), room
