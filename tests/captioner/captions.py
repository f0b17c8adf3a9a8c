# SPDX-License-Identifier: Apache-2.0
"""A short ragged training learns, and its page says what moved: captions.py CAPTIONER

180 steps teach far more than chance: a model that always says "none" is right for a quarter of the
samples. Decoding, which is another pass than the one whose gradients are checked, must thus read the
right positions on all context ranks. The page must show the balance of training steps, and bytes as
planned.
"""
import json
import os
import re
import subprocess
import sys
import tempfile


def run(steps):
    with tempfile.TemporaryDirectory() as folder:
        page = os.path.join(folder, 'page.html')
        done = subprocess.run([sys.argv[1], '--ragged', '--steps', steps, '--src', 'tp=1,dp=4', '--dst',
                               'tp=1,cp=2,dp=2', '--json', '--report', page], text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        if done.returncode:
            sys.exit('exit status %d:\n%s%s' % (done.returncode, done.stdout, done.stderr))
        print(done.stdout)
        with open(page, encoding='utf-8') as file:
            return json.loads(done.stdout), file.read()


result, text = run('180')
if result['accuracy'] < 0.4:
    sys.exit('%d of %d captions exact' % (result['exact'], result['held_out']))
if result['bridge_recv_bytes'] != result['plan_recv_bytes'] or not result['bridge_recv_bytes']:
    sys.exit('the bridges moved %s bytes per step, planned %s'
             % (result['bridge_recv_bytes'], result['plan_recv_bytes']))
before, after = map(float, re.search(
    r'had ([0-9.]+) times the mean before and has ([0-9.]+) times after', text).groups())
print('most loaded replica: %.2f times the mean before, %.2f after' % (before, after))
if not after <= 1.1 < before:
    sys.exit('the balance did not balance')
if text.count('data-name="rows after">') != 4 or 'Every planned row moved exactly' not in text:
    sys.exit('the page does not show rows of 4 ranks and bytes as planned')
# what is decoded is no training step
_, text = run('0')
if re.findall(r'"rows (?:before|after)">([0-9,]+)', text) != ['0'] * 8:
    sys.exit('the page of no steps shows rows')
