#!/usr/bin/env python3
"""Checks the Markdown files: relative links lead somewhere, cited rules exist, direct dependencies and settings are explained."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
problems: list[str] = []


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()
    return [ROOT / name for name in listed if (ROOT / name).is_file()]


def check_links() -> None:
    for page in tracked("*.md"):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if target.startswith(("http://", "https://", "#", "mailto:")):
                continue
            if not (page.parent / target.split("#")[0]).exists():
                problems.append(f"{page.relative_to(ROOT)}: broken link {target}")


def check_rules() -> None:
    """Every rule that code cites as `[O1]` is stated in docs/protocol.md."""
    stated = set(re.findall(r"\*\*\[([A-Z]\d+)\]", (ROOT / "docs/protocol.md").read_text()))
    for source in tracked("*.rs"):
        for number, line in enumerate(source.read_text().splitlines(), 1):
            if "//" not in line:
                continue
            comment = line.split("//", 1)[1]
            for rule in re.findall(r"\[([A-Z]\d+)\](?!\()", comment) + re.findall(r"\brules? ([A-Z]\d+)\b", comment):
                if rule not in stated:
                    problems.append(f"{source.relative_to(ROOT)}:{number}: rule [{rule}] is not in docs/protocol.md")


def check_dependencies() -> None:
    """Every direct dependency is explained in docs/dependencies.md."""
    page = (ROOT / "docs/dependencies.md").read_text()
    names: set[str] = set()
    for manifest in tracked("*Cargo.toml"):
        section = ""
        for line in manifest.read_text().splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif section.endswith("dependencies") and (match := re.match(r"([A-Za-z0-9_-]+)(\.workspace)?\s*=", line)):
                names.add(match.group(1))
    for name in sorted(names):
        if not name.startswith("kvfabric") and f"`{name}`" not in page:
            problems.append(f"docs/dependencies.md does not explain the direct dependency `{name}`")


def check_settings() -> None:
    """Every environment variable that the product reads is in docs/configuration.md."""
    page = (ROOT / "docs/configuration.md").read_text()
    source = (ROOT / "fabric/node/src/config.rs").read_text()
    for variable in sorted(set(re.findall(r'"(KVFABRIC_[A-Z_]+)"', source))):
        if variable not in page and variable not in ("KVFABRIC_NAMES",):
            problems.append(f"docs/configuration.md does not mention {variable}")


def main() -> int:
    check_links()
    check_rules()
    check_dependencies()
    check_settings()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"docs: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
