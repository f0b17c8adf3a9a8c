/* SPDX-License-Identifier: Apache-2.0 */
/* out-file.c - see out-file.h. The new name is in the same folder, so that rename() is atomic. */
#include "out-file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int open_new(out_file_t *out)
{
    size_t size = strlen(out->path) + 48;
    int fd = -1, error = ENOMEM;
    out->name = malloc(size);
    for (int i = 0; out->name && i < 100; i++) {
        snprintf(out->name, size, "%s.%ld-%d.tmp", out->path, (long)getpid(), i);
        fd = open(out->name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        error = errno;
        if (fd >= 0 || error != EEXIST)
            break;
    }
    out->f = fd >= 0 ? fdopen(fd, "w") : NULL;
    if (out->f)
        return 0;
    if (fd >= 0) {
        error = errno;
        close(fd);
        unlink(out->name);
    }
    free(out->name);
    out->name = NULL;
    return error;
}

int out_file_open(out_file_t *out, const char *path)
{
    struct stat st;
    int error = 0;
    *out = (out_file_t){.path = path};
    if (!*path) {
        error = ENOENT;
    } else if (stat(path, &st) != 0 || S_ISREG(st.st_mode)) {
        error = open_new(out);
    } else if (S_ISDIR(st.st_mode)) {
        error = EISDIR;
    } else {
        out->f = fopen(path, "w");
        error = out->f ? 0 : errno;
    }
    errno = 0; /* what is in it at commit comes from the writes */
    return error;
}

int out_file_check(const char *path)
{
    struct stat st;
    out_file_t out;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return access(path, W_OK) == 0 ? 0 : errno; /* its reader would see an end */
    const int error = out_file_open(&out, path);
    out_file_drop(&out);
    return error;
}

void out_file_drop(out_file_t *out)
{
    if (out->f)
        fclose(out->f);
    if (out->name)
        unlink(out->name);
    free(out->name);
    *out = (out_file_t){.f = NULL};
}

int out_file_commit(out_file_t *out)
{
    bool bad = fflush(out->f) != 0 || ferror(out->f);
    int error = errno; /* of this flush, or of the write that failed before it */
    if (fclose(out->f) != 0 && !bad) {
        bad = true;
        error = errno;
    }
    out->f = NULL;
    if (!bad && out->name && rename(out->name, out->path) != 0) {
        bad = true;
        error = errno;
    }
    if (bad) {
        out_file_drop(out);
        return error ? error : EIO;
    }
    free(out->name);
    out->name = NULL;
    return 0;
}
