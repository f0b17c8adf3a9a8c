# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a veth pair stand for two hosts: two-hosts.py PROGRAM

Four ranks, two in each, that share nothing but a folder for the bootstrap: their sockets cross the
pair by TCP. Where namespaces cannot be made (no root, no ip) this is exit 77 with the reason.
"""
import os
import shutil
import subprocess
import sys
import tempfile

RANKS = 4
HOSTS = ['colo%d%s' % (os.getpid(), side) for side in 'ab']


def ip(*words):
    done = subprocess.run(['ip', *words], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise OSError('ip %s: %s' % (' '.join(words), done.stdout.strip()))


def make():
    for host in HOSTS:
        ip('netns', 'add', host)
        ip('-n', host, 'link', 'set', 'lo', 'up')
    # In the first namespace from the start: nothing of this is seen outside.
    ip('-n', HOSTS[0], 'link', 'add', 'veth0', 'type', 'veth', 'peer', 'name', 'veth0',
       'netns', HOSTS[1])
    for i, host in enumerate(HOSTS):
        # First an address that both have, as bridges of containers do: it leads back home.
        ip('-n', host, 'address', 'add', '10.1.1.1/32', 'dev', 'veth0')
        ip('-n', host, 'address', 'add', '10.213.77.%d/24' % (i + 1), 'dev', 'veth0')
        ip('-n', host, 'link', 'set', 'veth0', 'up')


def remove():
    for host in HOSTS:
        subprocess.run(['ip', 'netns', 'delete', host], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def skip(why):
    print('skipped: %s' % why)
    sys.exit(77)


def main(program):
    if not shutil.which('ip'):
        skip('no ip here (Debian and Ubuntu: iproute2)')
    if os.getuid() != 0:
        skip('only root may make network namespaces')
    try:
        try:
            make()
        except OSError as why:
            skip('two network namespaces could not be made: %s' % why)
        with tempfile.TemporaryDirectory() as folder:
            ranks = [subprocess.Popen(
                ['ip', 'netns', 'exec', HOSTS[r % 2], program, folder, str(r), str(RANKS)],
                stdin=subprocess.DEVNULL, env=dict(os.environ, COLO_TIMEOUT_MS='60000'))
                for r in range(RANKS)]
            status = [rank.wait(timeout=100) for rank in ranks]
        print('%d ranks on 2 hosts: exit status %s' % (RANKS, status))
        return 1 if any(status) else 0
    finally:
        remove()


sys.exit(main(sys.argv[1]))
