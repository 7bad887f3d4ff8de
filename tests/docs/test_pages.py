"""Reading of pages: what counts as a program, a command or output, and how output is compared."""

from __future__ import annotations

from tests.docs.pages import all_blocks, blocks_of, differs, spoken

PAGE = """\
# Title

Text with `code`.

    weft passes      # lists them
    weft sweep a.txt \\
        --cluster h100-8

The tests do not run this block: it needs a GPU, and
it takes hours.

```sh
make all
```

Text.

```python
print(1)
```

```text
1
```

    some output
      more
"""


def test_blocks_are_found_with_their_kinds_and_reasons():
    found = list(blocks_of("page.md", PAGE))
    assert [(block.kind, block.line, block.not_run) for block in found] == [
        ("commands", 5, ""),
        ("commands", 13, "it needs a GPU, and it takes hours"),
        ("python", 19, ""),
        ("output", 23, ""),
        ("output", 26, ""),
    ]
    assert found[0].commands == ["weft passes", "weft sweep a.txt --cluster h100-8"]
    assert found[-1].text == "some output\n  more\n"


def test_commands_of_sentences_are_found_and_those_of_blocks_are_not():
    text = PAGE.replace("Text with `code`.", "Say `weft explain\nSOURCE`, or `make test`; `weft` alone says nothing.")
    assert spoken(text) == ["weft explain SOURCE", "make test", "weft"]


def test_dots_stand_for_anything_and_nothing_else_does():
    assert not differs("step ... us\n...\nend\n", "step 12 us\na\nb\nend\n")
    assert not differs("a\n...\nend", "a\nend")
    assert "the page shows" in differs("step 12 us\n", "step 13 us\n")
    assert differs("a\n", "a\nb\n")


def test_the_pages_have_blocks_of_every_kind():
    counts = {kind: len(all_blocks(kind)) for kind in ("python", "commands", "toml", "output")}
    assert counts["python"] > 20
    assert counts["commands"] > 10
    assert counts["toml"] > 0
    assert counts["output"] > 5
