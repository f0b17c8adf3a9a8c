/* SPDX-License-Identifier: Apache-2.0 */
/*
 * colo-info.c - which library this is, what it was built with, and every knob with its value.
 *
 * Decides nothing: versions come from version.h, knobs from the library's own table, so a knob that
 * the library reads is listed here without a word in this file. What this version lacks is listed
 * as lacking rather than left out, so that a script can ask for it.
 */
#include <colobridge/log.h>
#include <colobridge/version.h>

#include <jansson.h>

#include "options.h"

#define INFO_TOOL "colo-info"

static const char help[] =
    "usage: colo-info [--json]\n"
    "\n"
    "Prints the library's version, its backends, and each environment knob with its value.\n"
    "\n"
    "  --json           keys: version, header_version, backends {name: bool}, knobs [{name,\n"
    "                   value, source (environment or default), default, help}]\n"
    "  --version, --help\n"
    "\n"
    "Example: COLO_CHECK=2 colo-info\n"
    "Exit: 0 ok, 1 found a problem, 2 wrong use.\n";

static const struct {
    const char *name;
    bool built;
    const char *what;
} backends[] = {
    {"threads", true, "ranks in one process"},
    {"mpi", false, "ranks of many processes or hosts; not in this version"},
    {"nccl", false, "GPUs; not in this version"},
    {"cuda", false, "kernels; not in this version"},
    {"hwloc", false, "placement; not in this version"},
};
#define NBACKENDS (sizeof backends / sizeof backends[0])

static void header_version(char *text, size_t cap)
{
    snprintf(text, cap, "%d.%d.%d", COLO_VERSION_MAJOR, COLO_VERSION_MINOR, COLO_VERSION_PATCH);
}

static int print_text(void)
{
    char header[32], quoted[TOOL_QUOTE_MAX];
    bool bold = tool_colour(stdout), set;
    const char *on = bold ? "\033[1m" : "", *off = bold ? "\033[0m" : "";
    header_version(header, sizeof header);
    printf("%scolobridge %s%s (headers %s)\n\n%sbackends%s\n", on, colo_version(), off, header, on,
           off);
    for (size_t i = 0; i < NBACKENDS; i++)
        printf("  %-8s %-4s %s\n", backends[i].name, backends[i].built ? "yes" : "no",
               backends[i].what);
    printf("\n%sknobs%s\n", on, off);
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_knob_t *k = colo_env_knob(i);
        const char *value = colo_env_value(k->name, &set);
        printf("  %-18s %-12s %-16s %s\n", k->name, tool_quote(quoted, value),
               set ? "from environment" : "default", k->help);
    }
    return TOOL_OK;
}

/* A value that is no UTF-8 is quoted with its bytes escaped: JSON has no other way to carry it. */
static json_t *text_of(const char *value)
{
    char quoted[TOOL_QUOTE_MAX];
    json_t *text = json_string(value);
    return text ? text : json_string(tool_quote(quoted, value));
}

static int print_json(void)
{
    char header[32];
    json_t *built = json_object(), *knobs = json_array();
    int bad = 0;
    bool set;
    header_version(header, sizeof header);
    for (size_t i = 0; i < NBACKENDS; i++)
        bad |= json_object_set_new(built, backends[i].name, json_boolean(backends[i].built));
    for (int i = 0; i < colo_env_count(); i++) {
        const colo_env_knob_t *k = colo_env_knob(i);
        const char *value = colo_env_value(k->name, &set);
        bad |= json_array_append_new(knobs, json_pack("{s:s,s:o,s:s,s:s,s:s}", "name", k->name,
                                                      "value", text_of(value), "source",
                                                      set ? "environment" : "default", "default",
                                                      k->fallback, "help", k->help));
    }
    json_t *doc = json_pack("{s:s,s:s,s:o,s:o}", "version", colo_version(), "header_version",
                            header, "backends", built, "knobs", knobs);
    if (bad || !doc || json_dumpf(doc, stdout, JSON_INDENT(2)) != 0) {
        json_decref(doc);
        return tool_complain(TOOL_PROBLEM, INFO_TOOL,
                             "no memory for the JSON, or nowhere to write it");
    }
    printf("\n");
    json_decref(doc);
    return TOOL_OK;
}

int main(int argc, char **argv)
{
    tool_option_t options[] = {{.name = "--json", .flag = true},
                               {.name = "--version", .flag = true},
                               {.name = "--help", .flag = true}};
    int rc = tool_parse(INFO_TOOL, options, 3, argc, argv);
    if (rc != TOOL_OK)
        return rc;
    if (options[2].given)
        fputs(help, stdout);
    else if (options[1].given)
        printf("%s %s\n", INFO_TOOL, colo_version());
    else
        rc = options[0].given ? print_json() : print_text();
    return tool_finish(rc, INFO_TOOL);
}
