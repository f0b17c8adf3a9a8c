/* SPDX-License-Identifier: Apache-2.0 */
/*
 * status.h - what every call returns, and the one error message that explains it.
 *
 * 0 is success, > 0 is a result that the caller must handle, < 0 is an error: return it
 * unchanged. What returns no status (getters, destructors) takes NULL for its object and answers
 * 0, false, NULL, "", or -1 where 0 is a rank.
 *
 * What an error leaves behind:
 *   before   An error that is found before anything moves leaves all memory untouched. These are
 *            this rank's own arguments and states (ARG, SHAPE, LAYOUT, MODIFIED, UNBUILT,
 *            CONTRACT, EXISTS, MISSING), calls on a communicator that was dead before, all that
 *            COLO_CHECK=2 finds, and every other error after which the communicator lives
 *            (colo_comm_check()).
 *   in flight   Any other error kills the communicator: TIMEOUT, PEER, ABORTED, MISMATCH, NOMEM,
 *            STATE, IO, CUDA, NCCL or MPI. The outputs, the workspace and the saved state of the
 *            call may then hold old bytes, new ones or a mix of both, although the same call may
 *            have returned COLO_OK on another rank. Inputs, and memory that was not given to the
 *            call, are not written; what is input and output at once is an output.
 * Objects are made whole or not at all: on every error the pointer that would receive one, and
 * numbers that a call returns by pointer, are untouched. On a stream a call may return COLO_OK
 * and fail later; its outputs are then as after a failure in flight. Other ranks may still write
 * into registered memory until they have noticed (memory.h).
 *
 * Structs that begin with struct_size: the caller starts from the struct's COLO_..._INIT in
 * braces, in C and in C++17. It sets all defaults, and struct_size to the size that the caller's
 * header knows. A member whose default is not 0 (temperature, scale, ignore_index, check) is
 * assigned later: of {COLO_..._INIT, .member = ...} clang would warn, and gcc with -Wextra. The
 * library serves a shorter struct, as an older header has it, and gives the members that it lacks
 * their defaults. Members that have no default must be there. It refuses a longer struct with
 * COLO_ERR_ARG, because it cannot know what the members ask for. If the library writes the struct,
 * it writes the members that fit into struct_size, and nothing behind them.
 * A sized struct with reserved members never grows, because other structs contain it: members of
 * newer headers take their place, and 0 is their default. What is not 0 there is refused.
 * Structs without struct_size never change, because they lie in arrays or in other structs, or
 * because they hold all that their noun has; those that the library makes itself, and hands out one
 * by one, may get members at their end.
 *
 * Callbacks (of a rank, an all-gather, an allocator, the log, a tape) return. They must not throw a
 * C++ exception, longjmp() out of the call, or end the thread.
 */
#ifndef COLOBRIDGE_STATUS_H
#define COLOBRIDGE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define COLO_API __attribute__((visibility("default")))
#define COLO_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#else
#define COLO_API
#define COLO_PRINTF(fmt, args)
#endif

typedef enum colo_status_t {
    COLO_OK = 0,             /* ok */
    COLO_PENDING = 1,        /* work is enqueued; ask again */
    COLO_ERR_ARG = -1,       /* an argument is outside its stated range */
    COLO_ERR_SHAPE = -2,     /* a tensor's shape, dtype or strides do not match the plan */
    COLO_ERR_LAYOUT = -3,    /* these grids or layouts cannot be combined */
    COLO_ERR_NOMEM = -4,     /* memory could not be allocated */
    COLO_ERR_TIMEOUT = -5,   /* another rank did not arrive before the deadline */
    COLO_ERR_PEER = -6,      /* another rank reported an error */
    COLO_ERR_MISMATCH = -7,  /* ranks disagree about what they are doing together */
    COLO_ERR_MODIFIED = -8,  /* a saved tensor was written after it was saved */
    COLO_ERR_STATE = -9,     /* the object is not in a state that allows this call */
    COLO_ERR_UNBUILT = -10,  /* this build or this machine lacks the backend */
    COLO_ERR_CONTRACT = -11, /* the data are not as declared (replicated, zero) */
    COLO_ERR_EXISTS = -12,   /* the name is already taken */
    COLO_ERR_MISSING = -13,  /* no object of that name exists */
    COLO_ERR_IO = -14,       /* a file could not be read or written */
    COLO_ERR_ABORTED = -15,  /* the communicator was aborted */
    COLO_ERR_CUDA = -16,     /* CUDA reported an error */
    COLO_ERR_NCCL = -17,     /* NCCL reported an error */
    COLO_ERR_MPI = -18       /* MPI reported an error */
} colo_status_t;

/**
 * colo_status_string() - the fixed description of a status ("an argument is outside ...")
 * Never NULL; an unknown value gives "unknown status". Static storage. Any thread.
 */
COLO_API const char *colo_status_string(colo_status_t status);

/** colo_status_name() - "COLO_ERR_ARG" and so on; static storage */
COLO_API const char *colo_status_name(colo_status_t status);

/**
 * colo_last_error() - the error message of the last error on this thread, with its numbers
 * Valid until the next failing call on the same thread; "" when nothing failed yet.
 */
COLO_API const char *colo_last_error(void);

#ifdef __cplusplus
}
#endif
#endif
