# SPDX-License-Identifier: Apache-2.0
"""A sharded head trains with the very same bits as a resident one, with either loss.

usage: same-bits.py [--may-skip] COMMAND... (the captioner with its options, maybe by way of mpirun)
Runs it with --head resident and --head sharded, --loss logits and linear. Each run must find its
gradients right by itself; "bits", a hash of all weights and gradients before and after the steps,
must be equal for the two heads, and must not be for another seed, or it would say nothing.
"""
import json
import subprocess
import sys

command = sys.argv[1:]
may_skip = command[0] == '--may-skip'
command = command[may_skip:]


def run(*more):
    done = subprocess.run([*command, *more], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode == 77 and may_skip:
        print(done.stdout)
        sys.exit(77)
    last = done.stdout.strip().splitlines()[-1:]
    try:
        verdict = json.loads(last[0])
    except (IndexError, ValueError):
        sys.exit('%s: exit status %d, no verdict:\n%s%s'
                 % (more, done.returncode, done.stdout, done.stderr))
    print(' '.join(more), verdict['bits'], verdict.get('against_logits', ''),
          'all_gather', verdict['collectives']['all_gather'],
          'reduce_scatter', verdict['collectives']['reduce_scatter'])
    if done.returncode or not verdict['ok']:
        sys.exit('%s: exit status %d: %s' % (more, done.returncode, last[0]))
    return verdict


for loss in 'logits', 'linear':
    resident = run('--loss', loss, '--head', 'resident')
    sharded = run('--loss', loss, '--head', 'sharded')
    if resident['bits'] != sharded['bits']:
        sys.exit('--loss %s: bits %s with a resident head, %s with a sharded one'
                 % (loss, resident['bits'], sharded['bits']))
    if sharded['collectives']['reduce_scatter'] <= resident['collectives']['reduce_scatter']:
        sys.exit('--loss %s: the sharded head reduced nothing' % loss)
other = run('--loss', 'linear', '--head', 'sharded', '--seed', '2')
if other['bits'] == sharded['bits']:
    sys.exit('another seed gives the same bits: they say nothing')
