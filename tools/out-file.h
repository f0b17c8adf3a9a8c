/* SPDX-License-Identifier: Apache-2.0 */
/*
 * out-file.h - a file that appears whole or not at all: written under a new name next to its own,
 * then renamed. A target that is no regular file (a pipe, /dev/stdout) is written in place, since
 * renaming over a device would replace the device. C library only; the captioner uses it, too.
 */
#ifndef TOOLS_OUT_FILE_H
#define TOOLS_OUT_FILE_H

#include <stdio.h>

typedef struct out_file {
    FILE *f;
    const char *path; /* borrowed */
    char *name;       /* owned: what it is called until it is whole; NULL: written in place */
} out_file_t;

/* 0, or an errno with nothing left behind (EISDIR for a folder). */
int out_file_open(out_file_t *out, const char *path);
/* Would it open? 0, or an errno; nothing is left behind, and a pipe keeps its reader. For programs
 * that work for long before they write. */
int out_file_check(const char *path);
/* Flushes, closes, gives the file its name. 0, or an errno (EIO: unknown) with nothing left behind.
 */
int out_file_commit(out_file_t *out);
/* Closes and removes what was written so far. */
void out_file_drop(out_file_t *out);

#endif
