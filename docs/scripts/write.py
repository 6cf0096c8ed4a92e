"""Write every generated part of docs/: `python docs/scripts/write.py`.

The generated parts are the gallery, the tables and plots of the benchmarks, the list of rooms, the
names of attnkit.flex, and the outputs below code blocks. tests/docs compares all of them with what
this script writes.
"""

from __future__ import annotations

import benchmark_pages
import flex_names
import gallery_masks
import gallery_mods
import outputs
import rooms


def main() -> None:
    for module in (gallery_masks, gallery_mods, benchmark_pages, rooms, flex_names):
        for path, text in module.files().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    benchmark_pages.draw()
    outputs.rewrite()


if __name__ == "__main__":
    main()
