/* SPDX-License-Identifier: Apache-2.0 */
/* chosen.c - a program with mutants of which one is chosen when it runs: test_mutants.py plants
 * them. */
#include <stdio.h>

static const int table[] = {7};

static int in_turn(int x)
{
    if (x == 1)
        return 10;
    return 0;
}

static int by_label(int x)
{
    int r = in_turn(x);
    if (x < table[0])
        goto out;
    r += 100;
out:
    return r;
}

int main(void)
{
    printf("%d %d %d line %d\n", by_label(1), by_label(2), by_label(9), __LINE__);
    return 0;
}
