/* SPDX-License-Identifier: Apache-2.0 */
/*
 * show.c - what a person watching the captioner sees: the progress line and the sample images.
 *
 * Decides: on a terminal one line is rewritten a few times a second; elsewhere (a log, a pipe) a
 * plain line comes at every evaluation and otherwise every ten seconds, so that a log stays short.
 * With --json all of it goes to stderr.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "rank.h"

double cap_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void cap_progress_begin(cap_progress_t *p, const cap_config_t *cfg)
{
    FILE *out = cfg->json ? stderr : stdout;

    *p = (cap_progress_t){.start = cap_seconds(),
                          .steps = cfg->steps,
                          .accuracy = -1,
                          .terminal = isatty(fileno(out)),
                          .out = out};
}

void cap_progress_step(cap_progress_t *p, int64_t done, double loss, int64_t tokens,
                       double training, bool force)
{
    double now = cap_seconds(), spent = now - p->start;
    char exact[32] = "  -  ";

    if (!force && now - p->last < (p->terminal ? 0.2 : 10.0) && done != 1)
        return;
    p->last = now;
    if (p->accuracy >= 0)
        snprintf(exact, sizeof exact, "%5.1f %%", 100 * p->accuracy);
    fprintf(p->out, "%sstep %lld/%lld  loss %.4f  exact %s  %.0f tokens/s  %.0f s left%s",
            p->terminal ? "\r\033[K" : "", (long long)done, (long long)p->steps, loss, exact,
            training > 0 ? (double)tokens / training : 0.0,
            spent / (double)done * (double)(p->steps - done),
            p->terminal && done < p->steps ? "" : "\n");
    fflush(p->out);
}

static bool utf8(void)
{
    const char *names[] = {"LC_ALL", "LC_CTYPE", "LANG"};

    for (int i = 0; i < 3; i++) {
        const char *v = getenv(names[i]);
        if (v && *v)
            return strstr(v, "UTF-8") || strstr(v, "utf8") || strstr(v, "UTF8");
    }
    return false;
}

void cap_show_samples(const cap_config_t *cfg, const cap_sample_t *samples, int64_t n)
{
    static const char *const fine[] = {" ", "\xe2\x96\x91", "\xe2\x96\x92", "\xe2\x96\x93",
                                       "\xe2\x96\x88"};
    static const char *const plain[] = {" ", ".", "+", "*", "#"};
    const char *const *shade = utf8() ? fine : plain;
    FILE *out = cfg->json ? stderr : stdout;

    int64_t most = cfg->task.most > 1 ? cfg->task.most : 1, per_line = most > 1 ? 2 : 4;

    for (int64_t first = 0; first < n; first += per_line) {
        int64_t end = first + per_line < n ? first + per_line : n;

        fputc('\n', out);
        for (int y = 0; y < 8; y++) {
            for (int64_t i = first; i < end; i++) {
                for (int64_t x = 0; x < 8 * most; x++) {
                    const uint8_t *image =
                        x / 8 < samples[i].images ? samples[i].pixels[x / 8] : NULL;
                    const char *c = shade[image ? (image[8 * y + x % 8] * 4 + 8) / 16 : 0];
                    fprintf(out, "%s%s", c, c);
                }
                fputs("   ", out);
            }
            fputc('\n', out);
        }
        for (int64_t i = first; i < end; i++) {
            char text[128];
            const char *want = samples[i].want, *got = samples[i].caption;
            bool right = !strcmp(got, want);
            int offset = snprintf(text, sizeof text, "\"");

            for (; *got; got++)
                offset +=
                    snprintf(text + offset, sizeof text - (size_t)offset,
                             *got >= ' ' && *got <= '~' ? "%c" : "\\x%02x", (unsigned char)*got);
            snprintf(text + offset, sizeof text - (size_t)offset, right ? "\"" : "\" not %s", want);
            fprintf(out, "%-*s", (int)(16 * most + 3), text);
        }
        fputc('\n', out);
    }
    fputc('\n', out);
}
