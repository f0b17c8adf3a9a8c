# SPDX-License-Identifier: Apache-2.0
"""Builds wheels and the source archive for pip: meson-python on the whole source tree, of which python/ is a part.

No file of a wheel depends on Python's version or ABI, because ctypes loads the libraries. meson-python takes
each shared library in a package for an extension module, so the tags are written anew. So are the links of README.md.
"""
import os
import subprocess
import sys

os.chdir(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mesonpy  # noqa: E402  # it takes the current folder for the project
from description import describe  # noqa: E402
from mesonpy import build_sdist, get_requires_for_build_sdist, get_requires_for_build_wheel  # noqa: E402, F401


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    name = mesonpy.build_wheel(wheel_directory, config_settings, metadata_directory)
    describe(os.path.join(wheel_directory, name))
    told = subprocess.run(
        [sys.executable, '-m', 'wheel', 'tags', '--remove', '--python-tag', 'py3', '--abi-tag', 'none',
         os.path.join(wheel_directory, name)], check=True, stdout=subprocess.PIPE, text=True)
    return os.path.basename(told.stdout.split()[-1])


def get_requires_for_build_editable(config_settings=None):
    return mesonpy.get_requires_for_build_editable(config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """In a build folder that git ignores; importing the package builds there what has changed."""
    return mesonpy.build_editable(wheel_directory, {'build-dir': 'build-editable', **(config_settings or {})},
                                  metadata_directory)
