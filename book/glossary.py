"""GLOSSARY.md as a page on which each word leads to the sections of the notebooks in which it is used."""

from __future__ import annotations

import re

from reading import Notebook, Section, slug

ENTRY = re.compile(r"^\*\*(?P<word>[^*]+)\*\* (?P<text>\[\d\d\].+)$", re.MULTILINE)
ENDING = r"(?:s|es|ed|d|ing|e|ies|y)?"


def page(markdown: str, notebooks: list[Notebook]) -> str:
    """The glossary with a list of sections, folded, under each word."""

    def entry(found: re.Match[str]) -> str:
        body = f"{found['text']}\n\n{used_in(found['word'], notebooks)}".strip()
        indented = "\n".join(f"  {line}" if line else "" for line in body.splitlines())
        return f"{found['word']}\n{indented}\n"

    parts, end = [], 0
    for found in ENTRY.finditer(markdown):
        between = markdown[end : found.start()]
        if between.strip():  # text between words stays where it is
            parts += ["````\n" if end else "", between, "````{glossary}\n"]
        parts.append(entry(found) + "\n")
        end = found.end()
    return "".join([*parts, "````\n" if end else "", markdown[end:]])


def pattern(word: str) -> re.Pattern[str]:
    """Finds the word whatever its hyphens, line breaks and simple endings; capitals count in abbreviations alone."""
    stem = word if word.isupper() else re.sub(r"(?:ing|e|y)$", "", word)
    flexible = re.sub(r"(?:\\?[-_ ])+", r"[-_\\s]+", re.escape(stem))
    return re.compile(rf"(?<![A-Za-z-]){flexible}{ENDING}(?![A-Za-z])", 0 if word.isupper() else re.IGNORECASE)


def sections(word: str, notebook: Notebook) -> list[Section]:
    """The sections of a notebook whose text has the word."""
    wanted = pattern(word)
    return [s for s in notebook.sections if wanted.search(f"{s.heading}\n{without_addresses(s.text)}")]


def without_addresses(markdown: str) -> str:
    """Markdown without where its links lead to."""
    return re.sub(r"\]\([^)]*\)", "]", markdown)


def used_in(word: str, notebooks: list[Notebook]) -> str:
    """The list of sections that use the word; "" if there are none."""
    lines, count = [], 0
    for notebook in notebooks:
        found = sections(word, notebook)
        count += len(found)
        links = [link_to(notebook, section) for section in found]
        if links:
            lines.append(f"* {notebook.number} {notebook.short}: {' · '.join(links)}")
    if not lines:
        return ""
    summary = f"used in {count} section{'s' if count > 1 else ''}"
    return f"<details><summary>{summary}</summary>\n\n" + "\n".join(lines) + "\n\n</details>"


def link_to(notebook: Notebook, section: Section) -> str:
    """A link to a section of a notebook."""
    if not section.heading:
        return f"[introduction]({notebook.path})"
    words = re.sub(r"([][*_`$])", r"\\\1", section.heading)
    return f"[{words}]({notebook.path}#{slug(section.heading)})"
