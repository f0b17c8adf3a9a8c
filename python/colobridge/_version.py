# SPDX-License-Identifier: Apache-2.0
"""Of this package, and of the library that it takes. One source: meson.build (a test compares)."""
VERSION = '0.1.0'
