# SPDX-License-Identifier: Apache-2.0
"""What the tests of tools share: they run a built program, whose path is their argument, and judge what it wrote.

A case is a function with @case. Cases run in their order, each in a new folder, or those that the pattern T_CASES
names. What they print is what CMocka prints, because tools/count-tests.py and tests/mutation/must-fail.py read that.
"""
import collections
import contextlib
import fcntl
import fnmatch
import json
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import traceback
import xml.etree.ElementTree
from pathlib import Path

TOOL = os.path.realpath(sys.argv[1])
GOLDEN = Path(__file__).resolve().parent / 'golden'
VERSION = '.'.join(re.findall('#define COLO_VERSION_[A-Z]+ ([0-9]+)', (
    GOLDEN.parents[2] / 'include/colobridge/version.h').read_text()))
CASES = []
Ran = collections.namedtuple('Ran', 'exit out err')  # exit: a status, or -signal


class Skipped(Exception):
    """This machine cannot run the case."""


def case(function):
    CASES.append(function)
    return function


def case_if(condition):
    return case if condition else lambda function: function


def check(holds, why, *values):
    if not holds:
        raise AssertionError(why % values if values else why)


def equal(found, wanted):
    check(found == wanted, 'found %.2000r\nexpected %.2000r', found, wanted)


def words(line, *texts):
    """The words of @line, which single spaces separate; the next of @texts is the word in place of each %s."""
    texts = iter(texts)
    return [next(texts) if word == '%s' else word for word in line.split(' ')] if line else []


def run(line, *texts, env=None, stdout=subprocess.PIPE, **more):
    """In a plain environment: no NO_COLOR, TERM is xterm."""
    plain = {name: value for name, value in os.environ.items() if name != 'NO_COLOR'} | {'TERM': 'xterm'}
    done = subprocess.run([TOOL, *words(line, *texts)], env=plain | (env or {}), stdin=subprocess.DEVNULL,
                          stdout=stdout, stderr=subprocess.PIPE, check=False, **more)
    written = ((text or b'').decode(errors='surrogateescape') for text in (done.stdout, done.stderr))
    return Ran(done.returncode, *written)


def run_on_terminal(line, columns=0, **more):
    """With stdout on a new pseudo-terminal; None if the system has none, as a chroot without /dev/pts. 0 columns: it
    does not say how many it has."""
    try:
        ours, its = pty.openpty()
    except OSError:
        return None
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack('4H', 0, columns, 0, 0))
    with open(ours, 'rb', buffering=0) as reader:
        with open(its, 'wb', buffering=0) as terminal:
            ran = run(line, stdout=terminal, **more)
        written = b''
        with contextlib.suppress(OSError):  # EIO: no more; a read may have less than is there
            while True:
                written += reader.read(1 << 16)
        return ran._replace(out=written.decode())


def good(line, *texts, **more):
    """What it prints; on stderr is no word but how far it is after 2 seconds."""
    ran = run(line, *texts, **more)
    check(ran.exit == 0 and not re.sub(r'colo-plan: planned .*\n', '', ran.err), 'exit %d: %s', ran.exit, ran.err)
    return ran.out


class Real(float):
    """A number with a fraction or an exponent, which equals no integer"""
    __hash__ = float.__hash__

    def __eq__(self, other):
        return isinstance(other, float) and float(self) == float(other)


def once(pairs):
    check(len(dict(pairs)) == len(pairs), 'a key twice in %s', pairs)
    return dict(pairs)


def parsed(text):
    return json.loads(text, object_pairs_hook=once, parse_float=Real)


def planned(line, *texts, **more):
    """The JSON that it prints"""
    return parsed(good(line, *texts, **more))


def page(name):
    return (GOLDEN / name).read_text()


def refused(ran, text, code=2):
    """It ended with @code, and wrote one line of printable ASCII to stderr, at most 200 bytes, in which @text is."""
    check(ran.exit == code and not ran.out and text in ran.err and len(ran.err) <= 200 and
          re.fullmatch(NAME + r': [ -~]*\n', ran.err), '%s, expected exit %d and one line with "%s"', ran, code, text)


def refuses(text, line, *texts, code=2, **more):
    refused(run(line, *texts, **more), text, code)


def plain(element, fill='#000000'):
    """Colours are six digits, in attributes. Text, but names in boxes, is dark enough for white paper."""
    for name in 'fill', 'stroke':
        check(re.fullmatch('#[0-9a-f]{6}|none', element.get(name, 'none')), '%s: %s', name, element.attrib)
    fill = element.get('fill', fill)
    if element.tag.endswith('}text') and element.text and 'name' not in element.get('class', ''):
        light = [(int(fill[i:i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]  # WCAG 2's contrast, on white
        check(1.05 / (.2126 * light[0] + .7152 * light[1] + .0722 * light[2] + .05) >= 4.5, '%s is too light', fill)
    for child in element:
        plain(child, fill)


def picture(path):
    """The text of a picture, which is well-formed and as simple as pictures need it: any program shows it, in its size,
    on any page."""
    text = Path(path).read_text(encoding='utf-8')
    root = xml.etree.ElementTree.fromstring(text)
    check(not re.search('<[!?]|<style| style=|var\(|hsl|currentColor', text), 'no plain picture: %s', path)
    size = root.get('width'), root.get('height')
    check(all(re.fullmatch('[1-9][0-9]*', n) for n in size), 'a size of %s', size)
    equal(root.get('viewBox'), '0 0 %s %s' % size)
    paper = root[1]
    equal((paper.tag.rpartition('}')[2], paper.attrib), ('rect', {'width': size[0], 'height': size[1], 'fill': '#ffffff'}))
    plain(root)
    return text


def counted(text, *pairs):
    """Each of @pairs: what is in @text, and how often"""
    for what, times in pairs:
        check(text.count(what) == times, '"%s" is there %d times, expected %d, in %.4000s', what, text.count(what),
              times, text)


def in_order(text, *parts):
    for part in parts:
        check(part in text, 'what follows lacks "%s": %.4000s', part, text)
        text = text.partition(part)[2]


def main(name):
    """Runs the cases on the tool of that name."""
    global NAME
    NAME, bad = name, 0
    chosen = [c for c in CASES if fnmatch.fnmatchcase(c.__name__, os.environ.get('T_CASES', '*'))]
    print('[==========] Running %d test(s).' % len(chosen), flush=True)
    for each in chosen:
        print('[ RUN      ] ' + each.__name__, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                each()
                print('[       OK ] ' + each.__name__, flush=True)
            except Skipped:
                print('[  SKIPPED ] ' + each.__name__, flush=True)
            except Exception:
                bad += 1
                traceback.print_exc()
                print('[  FAILED  ] ' + each.__name__, file=sys.stderr, flush=True)
            os.chdir('/')
    print('[==========] %d test(s) run.' % len(chosen), flush=True)
    sys.exit(bad > 0)
