# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces joined by a veth pair stand for two hosts.

usage: two-hosts.py PROGRAM                    four ranks over UCX; with T_LACKS rank 1 has none,
                                              and all are told what to install
       two-hosts.py --mpi N PROGRAM ARGS...    N ranks of Open MPI's mpirun
       two-hosts.py --page LAUNCHER COLO_INFO  the command of docs/runtime/processes.md with that launcher

Half of the ranks live in each. Over UCX they share nothing but a folder for the bootstrap. For mpirun each host has an address and a name of its own, a daemon started
through a remote shell that is `ip netns exec`, and TCP as the only way to the other one. Where that
cannot be made (no root, no ip, another MPI) this is exit 77 with the reason.
"""
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time

RANKS = 4
SECONDS = 100  # less than the test's own limit, so that no namespace is left behind
HOSTS = ['colo%d%s' % (os.getpid(), side) for side in 'ab']
NET = '10.213.77.%s'


def ip(*words):
    done = subprocess.run(['ip', *words], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise OSError('ip %s: %s' % (' '.join(words), done.stdout.strip()))
    return done.stdout


def make():
    for host in HOSTS:
        ip('netns', 'add', host)
        ip('-n', host, 'link', 'set', 'lo', 'up')
    # In the first namespace from the start: nothing of this is seen outside.
    ip('-n', HOSTS[0], 'link', 'add', 'veth0', 'type', 'veth', 'peer', 'name', 'veth0',
       'netns', HOSTS[1])
    for i, host in enumerate(HOSTS):
        ip('-n', host, 'address', 'add', NET % (i + 1) + '/24', 'dev', 'veth0')
        ip('-n', host, 'link', 'set', 'veth0', 'up')
    end = time.monotonic() + 10
    for host in HOSTS:  # UCX takes only interfaces that run when its worker is made
        while 'state UP' not in ip('-n', host, '-o', 'link', 'show', 'veth0'):
            if time.monotonic() > end:
                raise OSError('veth0 of %s does not come up' % host)
            time.sleep(0.01)


def remove():
    for host in HOSTS:
        subprocess.run(['ip', 'netns', 'delete', host], stdin=subprocess.DEVNULL,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def end_now(number, frame):
    """A sender of SIGTERM may not wait for processes to end: the names go first."""
    remove()
    sys.exit(1)


def skip(why):
    print('skipped: %s' % why)
    sys.exit(77)


def stop(mpirun):
    """Of mpirun a request takes its ranks along; it may be deaf to it."""
    if mpirun.poll() is not None:
        return
    mpirun.terminate()
    try:
        mpirun.wait(timeout=10)
    except subprocess.TimeoutExpired:
        mpirun.kill()
        mpirun.wait()


def over_ucx(folder, program):
    lacks = 'T_LACKS' in os.environ
    ranks = [subprocess.Popen(
        ['ip', 'netns', 'exec', HOSTS[r % 2], program, folder, str(r), str(RANKS)],
        stdin=subprocess.DEVNULL, stderr=subprocess.PIPE if lacks else None, text=True,
        env=dict(os.environ, COLO_TIMEOUT_MS='60000', COLO_NODE=HOSTS[r % 2], **({'COLO_BACKEND_DIR': folder} if r == 1 and lacks else {})))
        for r in range(RANKS)]
    end = time.monotonic() + SECONDS
    try:
        said = [rank.communicate(timeout=max(0, end - time.monotonic()))[1] for rank in ranks]
    except subprocess.TimeoutExpired:
        print('not all ranks ended within %d s' % SECONDS, file=sys.stderr)
        return 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    status = [rank.returncode for rank in ranks]
    print('%d ranks on 2 hosts: exit status %s' % (RANKS, status))
    if lacks:
        print(''.join(said))
        return 0 if all(status) and all('apt install libucx0, or pip install libucx-cu12' in s for s in said) else 1
    return 1 if any(status) else 0


def make_agent(folder):
    """What a remote shell does: enter the host of that address, let a shell read the words."""
    agent = os.path.join(folder, 'enter')
    with open(agent, 'w') as out:
        out.write('#!/bin/sh\ncase $1 in\n')
        for i, host in enumerate(HOSTS):
            out.write('%s) host=%s ;;\n' % (NET % (i + 1), host))
        out.write('*) echo "no host $1" >&2; exit 1 ;;\nesac\nshift\n'
                  'exec ip netns exec "$host" unshare --uts sh -c "hostname $host && $*"\n')
    os.chmod(agent, 0o755)
    return agent


def options_of_mpirun(agent):
    net = NET % '0/24'
    mca = {'plm': 'rsh', 'plm_rsh_agent': agent, 'orte_keep_fqdn_hostnames': '1',
           'oob_tcp_if_include': net, 'pml': 'ob1', 'btl': 'tcp,self', 'btl_tcp_if_include': net}
    words = ['--allow-run-as-root', '--oversubscribe', '--bind-to', 'none', '--quiet']
    for name, value in mca.items():
        words += ['--mca', name, value]
    return words


TOLD = {'srun': ('SLURM_PROCID', 'SLURM_NTASKS'), 'torchrun': ('RANK', 'WORLD_SIZE')}


def starts(launcher):
    """False: there is none, or it ends with an error of its own, as torchrun of PyTorch 1.13 does under
    Python 3.11."""
    if launcher == 'mpirun':
        return True
    if not shutil.which(launcher):
        return False
    return subprocess.run([launcher, '--nnodes', '1', '--nproc_per_node', '1', '--no_python', 'true'],
                          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL).returncode == 0


def on_page(folder, launcher, colo_info):
    """Runs what docs/runtime/processes.md says, with addresses and a folder that are here."""
    page = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..', 'docs', 'runtime', 'processes.md')
    with open(page) as file:
        lines = [line.split() for line in file if line.startswith(launcher + ' ') and '--world' in line]
    if not lines:
        print('docs/runtime/processes.md has no line with --world that begins with %s' % launcher, file=sys.stderr)
        return 1
    agent = make_agent(folder)
    here = {'10.0.0.1': NET % 1, '10.0.0.2': NET % 2, '/shared': folder}
    started, env = [], dict(os.environ, COLO_TIMEOUT_MS='60000')
    for at, line in enumerate(lines):
        command = ' '.join(colo_info if word == 'colo-info' else word for word in line)
        for old, new in here.items():
            command = command.replace(old, new)
        runs = [(at, command, {})]
        if launcher == 'mpirun':
            runs = [(0, command.replace('mpirun', 'mpirun ' + shlex.join(options_of_mpirun(agent)), 1), {})]
        if launcher == 'srun' or not starts(launcher): # two tasks of each host, as it starts them
            rank, size = TOLD[launcher]
            hosts = range(2) if launcher == 'srun' else [at]
            runs = [(h, shlex.join(shlex.split(command)[-3:]), {rank: str(2 * h + i), size: '4'})
                    for h in hosts for i in range(2)]
        for host, words, more in runs:
            started.append(subprocess.Popen([agent, NET % (host + 1), 'exec ' + words],
                                            text=True, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.PIPE, env=dict(env, **more)))
    end, out = time.monotonic() + SECONDS, ''
    try:
        out = ''.join(process.communicate(timeout=max(0, end - time.monotonic()))[0]
                      for process in started)
    except subprocess.TimeoutExpired:
        print('not all ranks ended within %d s' % SECONDS, file=sys.stderr)
    finally:
        for process in started:
            stop(process)
    print(out)
    wanted = ['on 2 nodes', '  0  %-16s  0-1' % HOSTS[0], '  1  %-16s  2-3' % HOSTS[1],
              '2 pairs by Unix socket, because they are on one host and one network namespace: 0-1 2-3',
              '4 pairs by ucx, because they are on two hosts: 0-2 0-3 1-2 1-3']
    lacks = [line for line in wanted if line not in out]
    for line in lacks:
        print('missing: %s' % line, file=sys.stderr)
    return 1 if lacks or any(process.returncode for process in started) else 0


def over_mpi(folder, n, words):
    """mpirun on the first host; ranks alternate, so that neighbours are on different hosts"""
    agent = make_agent(folder)
    # Each rank says where it is; the test is worth nothing if they are all on one host.
    seen = os.path.join(folder, 'seen')
    os.mkdir(seen)
    rank = os.path.join(folder, 'rank')
    with open(rank, 'w') as out:
        out.write('#!/bin/sh\necho "$OMPI_COMM_WORLD_LOCAL_SIZE" '
                  '>%s/$(hostname).$OMPI_COMM_WORLD_RANK\nexec "$@"\n' % seen)
    os.chmod(rank, 0o755)
    command = ['mpirun', *options_of_mpirun(agent), '--map-by', 'node', '--host',
               ','.join('%s:%d' % (NET % (i + 1), n // 2) for i in range(2))]
    for name in ('T_BACKEND', 'COLO_BACKEND_DIR', 'COLO_TIMEOUT_MS', 'OPENBLAS_NUM_THREADS',
                 'OMP_NUM_THREADS'):
        if name in os.environ:
            command += ['-x', name]
    command += ['-n', str(n), rank, *words]
    done = subprocess.Popen([agent, NET % 1, 'exec ' + shlex.join(command)],
                            stdin=subprocess.DEVNULL)
    try:
        done.wait(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print('mpirun did not end within %d s' % SECONDS, file=sys.stderr)
        return 1
    finally:
        stop(done)
    where = sorted(name.rsplit('.', 1)[0] for name in os.listdir(seen))
    if where != sorted(HOSTS * (n // 2)):
        print('not half of the ranks on each host: %s' % where, file=sys.stderr)
        return 1
    return done.returncode if 0 <= done.returncode < 256 else 1


def needs_for_mpi():
    if not shutil.which('mpirun'):
        skip('no mpirun here (Debian and Ubuntu: openmpi-bin)')
    says = subprocess.run(['mpirun', '--version'], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    if '(Open MPI) 4.' not in says:
        skip('mpirun is not of Open MPI 4: how to send its ranks to two hosts is not known here')
    if not shutil.which('unshare'):
        skip('no unshare here (Debian and Ubuntu: util-linux)')


def main(words):
    page = words[0] == '--page'
    mpi = words[0] == '--mpi' or words[:2] == ['--page', 'mpirun']
    if not shutil.which('ip'):
        skip('no ip here (Debian and Ubuntu: iproute2)')
    if os.getuid() != 0:
        skip('only root may make network namespaces')
    if mpi:
        needs_for_mpi()
    if page and not shutil.which('unshare'):
        skip('no unshare here (Debian and Ubuntu: util-linux)')
    signal.signal(signal.SIGTERM, end_now)
    try:
        try:
            make()
        except OSError as why:
            skip('two network namespaces could not be made: %s' % why)
        with tempfile.TemporaryDirectory() as folder:
            if page:
                return on_page(folder, words[1], words[2])
            if mpi:
                return over_mpi(folder, int(words[1]), words[2:])
            return over_ucx(folder, words[0])
    finally:
        remove()


sys.exit(main(sys.argv[1:]))
