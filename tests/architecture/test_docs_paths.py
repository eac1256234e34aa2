"""Check that every page of docs/ that the code, the tests and the pages themselves name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of QEMU's repository, not of this one.
FOREIGN = {"docs/interop/qcow2.txt"}
#: Files of the code that a page names.
CODE = re.compile(r"`((?:app_adapters|benchmarks|cluster_manager|ebbtide|guestagent|hostagent|tests)/[\w/]+\.py)")
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/.-]+\.(?:md|json|svg|txt)\b")


FOLDERS = (
    "app_adapters", "benchmarks", "cluster_manager", "docs", "ebbtide", "examples", "experiments", "guestagent",
    "hostagent", "scripts", "tests", "vagrant",
)  # fmt: skip


def test_pages_that_are_mentioned_exist() -> None:
    files = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    found = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*")]
    files += [file for file in found if file.suffix in {".py", ".md", ".toml"}]
    missing = {
        f"{file.relative_to(ROOT)}: {mention}"
        for file in files
        for mention in MENTION.findall(file.read_text(encoding="utf-8"))
        if mention not in FOREIGN and not (ROOT / mention).exists()
    }
    assert not missing, missing


def test_files_of_the_code_that_pages_name_exist() -> None:
    missing = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        if page.name != "CHANGELOG.md"
        for name in CODE.findall(page.read_text(encoding="utf-8"))
        if "NAME" not in name and not (ROOT / name).exists()
    }
    assert not missing, missing
