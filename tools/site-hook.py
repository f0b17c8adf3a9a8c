# SPDX-License-Identifier: Apache-2.0
"""What mkdocs does not know of the pages: bench/results/ and Doxygen's pages are part of the site, and other files of the
source tree, which pages link to, are not; such a link becomes the words and the path, or, with repo_url, a link to the
repository."""
import ast
import posixpath
import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
THERE = {'docs/': '', 'bench/results/': 'results/'}  # folder of the tree: of the site


def on_files(files, config):
    for path in sorted((ROOT / 'bench/results').iterdir()):
        files.append(File.generated(config, 'results/' + path.name, abs_src_path=str(path)))
    files.append(File.generated(config, 'c/index.html', content=''))  # Doxygen writes it
    return files


def on_page_markdown(markdown, page, config, files):
    at = page.file.src_uri
    here = next((tree + at[len(site):] for tree, site in reversed(THERE.items()) if at.startswith(site)))

    def link(found):
        words, target, anchor = found[1], found[2], found[3] or ''
        if re.match(r'\w+:', target):
            return found[0]
        to = posixpath.normpath(posixpath.join(posixpath.dirname(here), target)) if target else here
        if not (ROOT / to).exists():
            return found[0]  # which mkdocs complains of
        for tree, site in THERE.items():
            if to.startswith(tree):
                to = posixpath.relpath(site + to[len(tree):], posixpath.dirname(at) or '.')
                return '[%s](%s%s)' % (words, to, anchor)
        if config.repo_url:
            return '[%s](%s/blob/main/%s%s)' % (words, config.repo_url.rstrip('/'), to, anchor)
        return words if to in words else '%s (`%s`)' % (words, to)

    if at == 'reference/python.md':  # mkdocstrings takes colobridge.torch.nll for the module
        tree = ast.parse((ROOT / 'python/colobridge/torch/__init__.py').read_text())
        same = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)
                and node.module in [name.name for name in node.names]]
        markdown = re.sub('<!-- functions.*-->', '\n'.join('::: colobridge.torch.%s.%s' % (name, name) for name in same), markdown)
    if at == 'reference/c.md':
        markdown += '\n## Functions and structs\n\n[All of them, by header](../c/index.html).\n'
    parts = re.split(r'(^ *```.*?^ *```)', markdown, flags=re.S | re.M)
    return ''.join(p if i % 2 else re.sub(r'(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]*)(#[^)\s]*)?\)', link, p)
                   for i, p in enumerate(parts))


def on_page_content(html, page, config, files):
    """Docstrings name pages by their path."""
    def link(found):
        if not files.get_file_from_path(found[1] + '.md'):
            raise PluginError('a docstring names docs/%s.md, which does not exist' % found[1])
        to = posixpath.relpath(found[1] + '.html', posixpath.dirname(page.file.src_uri))
        return '<a href="%s%s">%s</a>' % (to, found[2] or '', found[0])
    if page.file.src_uri != 'reference/python.md':
        return html
    return re.sub(r'(?<![\w/"])docs/([\w/-]+)\.md(#[\w-]+)?', link, html)
