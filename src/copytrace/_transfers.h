/* The native recorder in three parts: _record.c writes rows, _hooks.c stands in for the movers of libc, _slots.c points
   the loaded objects at them. _transfers.c is the Python module. All sizes are bytes. */

#ifndef COPYTRACE_TRANSFERS_H
#define COPYTRACE_TRANSFERS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#if !defined(__linux__) || !defined(__LP64__) || !(defined(__x86_64__) || defined(__AARCH64EL__))
#error "moves are recorded on 64-bit Linux on x86 and little-endian ARM only"
#endif

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

/* --- records (_record.c) ----------------------------------------------------------------------------------------------- */

enum kind { COPY, FETCH, FLUSH, MARK };

struct row {
    _Atomic uint64_t sequence; /* written last; 0 is an unfinished row */
    uint64_t thread;           /* pthread_self(), which is threading.get_ident() */
    uint64_t source;           /* address, a fetch's descriptor, or a mark's span */
    uint64_t destination;      /* address, or a flush's descriptor */
    uint64_t kind_and_size;    /* kind << KIND_SHIFT | bytes */
    uint64_t caller;           /* return address */
};

enum { KIND_SHIFT = 56, SPARE_SEGMENTS = 2, MAX_SEGMENTS = 1 << 16 };

struct sum {
    _Atomic uint64_t caller;
    _Atomic uint64_t moves;
    _Atomic uint64_t bytes;
};

/* Small moves are summed by caller: each of the first threads has sums of its own, the others and what finds no place there
   share some, and the last takes the rest. */
enum { LANE_BITS = 5, LANES = 1 << LANE_BITS, LANE_PROBES = 4, OWN_BITS = 10, SHARED_BITS = 12, PROBES = 32 };

/* counters.bin: the reader knows this layout. */
struct counters {
    uint64_t row_bits, sums_at, sum_count;
    uint64_t next; /* once the session has ended: the sequence after the last, and how many were taken too late */
    uint64_t late;
    _Alignas(128) _Atomic uint64_t marks;
    _Atomic uint64_t lost;
    _Atomic uint64_t lost_marks;
    _Alignas(128) _Atomic uint64_t owners[LANES];
    _Alignas(128) struct sum own[LANES][1 << OWN_BITS];
    struct sum shared[1 << SHARED_BITS];
    struct sum others;
};

struct totals {
    uint64_t moves, lost, marks, lost_marks;
};

struct session;

/* A page that the kernel hands to a forked child as zeros: the child is inert from its first instruction. */
struct control {
    _Atomic(struct session *) session;
};

extern struct control *copytrace_control;
extern _Atomic uint64_t copytrace_threshold; /* moves below it are summed */

/* Functions that return int return 0 or an errno unless they say otherwise. */
int copytrace_record_initialise(void);
int copytrace_record_open(const char *directory, uint64_t threshold, unsigned row_bits, size_t segment_limit);
/* From here on hooks only pass through. Returns 1 when there is a session to close, 0 in a forked child, which has none. */
int copytrace_record_end(void);
/* Waits until no thread writes any more, trims the files and gives the memory back. May block for a moment. */
struct totals copytrace_record_close(void);
/* The last sequence taken, and how many of them by marks. */
uint64_t copytrace_sequence(void);
uint64_t copytrace_marks(void);
/* Takes a sequence and writes a mark; *count is the number of marks before it. Returns 0 when nothing is recorded. Only one
   thread may be in here at a time. */
uint64_t copytrace_mark(uint64_t span, uint64_t *count);
/* Appends to a file of the session. */
void copytrace_append(const char *name, const char *text, size_t size);

void copytrace_keep(enum kind kind, uint64_t source, uint64_t destination, uint64_t size, uintptr_t caller);
void copytrace_add_small(uint64_t size, uintptr_t caller);

/* --- hooks (_hooks.c) -------------------------------------------------------------------------------------------------- */

struct call {
    const char *name;
    uintptr_t hook;
    uintptr_t *real;  /* what the hook calls: libc's function, or a preloaded one */
    uintptr_t global; /* what a lookup in the whole program finds, 0 when there is no such function */
};

extern struct call copytrace_calls[];
extern const size_t copytrace_call_count;

void copytrace_hooks_initialise(void);

/* --- slots (_slots.c) -------------------------------------------------------------------------------------------------- */

typedef void copytrace_visitor(void *data, const char *object, const char *symbol, uintptr_t address, uintptr_t value);

void copytrace_slots_initialise(void);
/* Waits until every object that the loader has begun to load is complete. The caller may not hold Python's lock. */
void copytrace_slots_settle(void);
/* Patches all objects and lists those that are new, or all at first, in objects.tsv. Returns 1 when it did nothing because an
   object was added since copytrace_slots_settle and may not be complete. Only one thread may be in here at a time. */
int copytrace_slots_patch(int first);
/* True when the loader has added objects since the last patch. */
int copytrace_slots_stale(void);
size_t copytrace_slots_patched(void);
void copytrace_slots_restore(void);
/* Shows every slot there is, patched or not, under the loader's lock. */
void copytrace_slots_visit(copytrace_visitor *visitor, void *data);

#pragma GCC visibility pop

#endif
