/* Rows go to memory mapped segment files, so that they outlive a killed process. What a hook runs here takes no lock,
   allocates nothing and may be interrupted by a signal whose handler moves bytes, too.

   The sequence is also the place: row n lies in segment n >> row_bits. The thread that takes the first row of a segment
   prepares the one SPARE_SEGMENTS ahead with three system calls and a compare-and-swap; who comes second unmaps his own.

   A session is given back only after every thread has left it: a thread counts itself in before it loads the session, and
   the session is cleared before the counts are read. When a thread does not leave in time, the session's memory stays,
   cut off from the files. */

#include "_transfers.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

enum { NAME_ROOM = 32, INSIDE_BITS = 6, WAIT_ROUNDS = 400, WAIT_NANOSECONDS = 250000, MARKS_PER_RETRY = 256 };

struct session {
    unsigned row_bits;
    size_t limit; /* segments */
    size_t bytes; /* of a segment */
    char directory[PATH_MAX - NAME_ROOM];
    _Atomic(struct row *) segments[MAX_SEGMENTS];
};

struct lane {
    _Alignas(128) _Atomic long inside;
};

struct control *copytrace_control;
uint64_t copytrace_threshold = 1;

static struct counters *counters; /* one address for the life of the process: the session's file, else private zeros */
static struct lane lanes[1 << INSIDE_BITS];
static struct session *current;

static unsigned hash(uint64_t value, unsigned bits) {
    return (unsigned)((value * UINT64_C(0x9E3779B97F4A7C15)) >> (64 - bits));
}

/* --- files: by direct system calls, so that memray sees none of our mappings ------------------------------------------- */

static void *map(void *address, size_t size, int flags, int descriptor) {
    return (void *)syscall(SYS_mmap, address, size, (long)(PROT_READ | PROT_WRITE), (long)flags, (long)descriptor, 0L);
}

static void *map_zeros(void *address, size_t size) {
    return map(address, size, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (address ? MAP_FIXED : 0), -1);
}

/* By hand: snprintf may not run in a signal handler. */
static void join(char *path, const char *directory, const char *name) {
    while (*directory)
        *path++ = *directory++;
    *path++ = '/';
    while ((*path++ = *name++)) {
    }
}

static void segment_path(const struct session *session, size_t segment, char *path) {
    char name[] = "moves-00000.bin";
    for (char *digit = name + 10; digit >= name + 6; digit--, segment /= 10)
        *digit = (char)('0' + segment % 10);
    join(path, session->directory, name);
}

static int open_file(const char *path, int flags) {
    return (int)syscall(SYS_openat, (long)AT_FDCWD, path, (long)(flags | O_CREAT | O_CLOEXEC | O_NOFOLLOW), 0600L);
}

/* Takes the blocks now: a full disk must be an error here, not a SIGBUS in a hook. */
static int reserve(int descriptor, size_t size) {
    static const char zeros[4096];
    if (!syscall(SYS_fallocate, (long)descriptor, 0L, 0L, (long)size))
        return 0;
    if (errno != EOPNOTSUPP && errno != ENOSYS)
        return errno;
    for (size_t done = 0; done < size;) {
        size_t piece = size - done < sizeof zeros ? size - done : sizeof zeros;
        long written = syscall(SYS_pwrite64, (long)descriptor, zeros, piece, (long)done);
        if (written < 0 && errno != EINTR)
            return errno;
        done += written > 0 ? (size_t)written : 0;
    }
    return 0;
}

static int map_file(const char *path, size_t size, void *address, void **mapped) {
    int descriptor = open_file(path, O_RDWR);
    if (descriptor < 0)
        return errno;
    int error = reserve(descriptor, size);
    if (!error) {
        *mapped = map(address, size, MAP_SHARED | (address ? MAP_FIXED : 0), descriptor);
        error = *mapped == MAP_FAILED ? errno : 0;
    }
    syscall(SYS_close, (long)descriptor);
    return error;
}

void copytrace_append(const char *name, const char *text, size_t size) {
    char path[PATH_MAX];
    join(path, current->directory, name);
    int descriptor = open_file(path, O_WRONLY | O_APPEND);
    while (descriptor >= 0 && size) {
        long written = syscall(SYS_write, (long)descriptor, text, size);
        if (written <= 0)
            break;
        text += written;
        size -= (size_t)written;
    }
    syscall(SYS_close, (long)descriptor);
}

/* --- segments ---------------------------------------------------------------------------------------------------------- */

static struct row *segment_rows(struct session *session, size_t segment) {
    return segment < session->limit ? atomic_load_explicit(&session->segments[segment], memory_order_acquire) : NULL;
}

static int prepare(struct session *session, size_t segment) {
    if (segment >= session->limit)
        return ENOSPC;
    if (segment_rows(session, segment))
        return 0;
    char path[PATH_MAX];
    void *mapped;
    segment_path(session, segment, path);
    int error = map_file(path, session->bytes, NULL, &mapped);
    if (error)
        return error;
    struct row *none = NULL;
    if (!atomic_compare_exchange_strong(&session->segments[segment], &none, (struct row *)mapped))
        syscall(SYS_munmap, mapped, session->bytes);
    return 0;
}

/* The spare segments are made ready, full ones leave our resident memory. */
static void advance(struct session *session, size_t segment) {
    int saved = errno;
    for (size_t ahead = 1; ahead <= SPARE_SEGMENTS; ahead++)
        prepare(session, segment + ahead);
    struct row *full = segment >= 2 ? segment_rows(session, segment - 2) : NULL;
    if (full)
        syscall(SYS_madvise, full, session->bytes, (long)MADV_DONTNEED);
    errno = saved;
}

static uint64_t take(struct session *session) {
    uint64_t sequence = atomic_fetch_add_explicit(&counters->next, 1, memory_order_relaxed);
    if (!(sequence & ((UINT64_C(1) << session->row_bits) - 1)))
        advance(session, sequence >> session->row_bits);
    return sequence;
}

static int write_row(struct session *session, uint64_t sequence, uint64_t thread, enum kind kind, uint64_t source,
                     uint64_t destination, uint64_t size, uintptr_t caller) {
    struct row *rows = segment_rows(session, sequence >> session->row_bits);
    if (!rows)
        return 0;
    struct row *row = rows + (sequence & ((UINT64_C(1) << session->row_bits) - 1));
    row->thread = thread;
    row->source = source;
    row->destination = destination;
    row->kind_and_size = (uint64_t)kind << KIND_SHIFT | size;
    row->caller = caller;
    atomic_store_explicit(&row->sequence, sequence, memory_order_release);
    return 1;
}

/* --- what hooks and marks call ----------------------------------------------------------------------------------------- */

void copytrace_keep(enum kind kind, uint64_t source, uint64_t destination, uint64_t size, uintptr_t caller) {
    uint64_t thread = (uint64_t)pthread_self();
    _Atomic long *inside = &lanes[hash(thread, INSIDE_BITS)].inside;
    atomic_fetch_add(inside, 1);
    struct session *session = atomic_load(&copytrace_control->session);
    if (session && !write_row(session, take(session), thread, kind, source, destination, size, caller))
        atomic_fetch_add_explicit(&counters->lost, 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(inside, 1, memory_order_release);
}

void copytrace_add_small(uint64_t size, uintptr_t caller) {
    struct sum *lane = counters->small[hash((uint64_t)pthread_self(), LANE_BITS)];
    struct sum *sum = &lane[SUMS];
    unsigned first = hash(caller, SUM_BITS);
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct sum *candidate = &lane[(first + probe) & (SUMS - 1)];
        uintptr_t owner = atomic_load_explicit(&candidate->caller, memory_order_relaxed);
        if (!owner && atomic_compare_exchange_strong_explicit(&candidate->caller, &owner, caller, memory_order_relaxed,
                                                              memory_order_relaxed))
            owner = caller;
        if (owner == caller) {
            sum = candidate;
            break;
        }
    }
    atomic_fetch_add_explicit(&sum->moves, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&sum->bytes, size, memory_order_relaxed);
}

uint64_t copytrace_mark(uint64_t span, uint64_t *count) {
    struct session *session = atomic_load(&copytrace_control->session);
    if (!session)
        return 0;
    uint64_t thread = (uint64_t)pthread_self();
    *count = atomic_fetch_add_explicit(&counters->marks, 1, memory_order_relaxed);
    uint64_t sequence = take(session);
    size_t segment = sequence >> session->row_bits;
    if (!write_row(session, sequence, thread, MARK, span, 0, 0, 0)
        && (prepare(session, segment) || !write_row(session, sequence, thread, MARK, span, 0, 0, 0)))
        atomic_fetch_add_explicit(&counters->lost_marks, 1, memory_order_relaxed);
    if (!(*count % MARKS_PER_RETRY))
        prepare(session, segment + 1);
    return sequence;
}

uint64_t copytrace_sequence(void) {
    uint64_t next = atomic_load_explicit(&counters->next, memory_order_relaxed);
    return next ? next - 1 : 0;
}

uint64_t copytrace_marks(void) {
    return atomic_load_explicit(&counters->marks, memory_order_relaxed);
}

/* --- sessions ---------------------------------------------------------------------------------------------------------- */

static size_t prepared_limit(const struct session *session, uint64_t next) {
    size_t limit = (next >> session->row_bits) + SPARE_SEGMENTS + 1;
    return limit < session->limit ? limit : session->limit;
}

/* quiet: no thread holds an address of the session. */
static void release(struct session *session, uint64_t next, int quiet) {
    for (size_t segment = 0; segment < prepared_limit(session, next); segment++) {
        struct row *rows = segment_rows(session, segment);
        if (rows && quiet)
            syscall(SYS_munmap, rows, session->bytes);
        else if (rows)
            map_zeros(rows, session->bytes);
    }
    map_zeros(counters, sizeof *counters);
}

static void trim(struct session *session, uint64_t next) {
    char path[PATH_MAX];
    for (size_t segment = next >> session->row_bits; segment < prepared_limit(session, next); segment++) {
        uint64_t first = (uint64_t)segment << session->row_bits;
        segment_path(session, segment, path);
        if (next > first)
            syscall(SYS_truncate, path, (long)((next - first) * sizeof(struct row)));
        else
            syscall(SYS_unlinkat, (long)AT_FDCWD, path, 0L);
    }
}

/* In a forked child: the files are the parent's. */
static void abandon(void) {
    atomic_store(&copytrace_control->session, NULL);
    for (size_t lane = 0; lane < sizeof lanes / sizeof *lanes; lane++)
        atomic_store(&lanes[lane].inside, 0);
    if (current)
        release(current, atomic_load(&counters->next), 0);
    current = NULL;
}

int copytrace_record_initialise(void) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *shared = map_zeros(NULL, page), *zeros = map_zeros(NULL, sizeof *counters);
    if (shared == MAP_FAILED || zeros == MAP_FAILED)
        return ENOMEM;
    syscall(SYS_madvise, shared, page, (long)MADV_WIPEONFORK);
    copytrace_control = shared;
    counters = zeros;
    return pthread_atfork(NULL, NULL, abandon);
}

int copytrace_record_open(const char *directory, uint64_t threshold, unsigned row_bits, size_t segment_limit) {
    if (strlen(directory) >= sizeof current->directory)
        return ENAMETOOLONG;
    struct session *session = map_zeros(NULL, sizeof *session);
    if (session == MAP_FAILED)
        return ENOMEM;
    session->row_bits = row_bits;
    session->limit = segment_limit < MAX_SEGMENTS ? segment_limit : MAX_SEGMENTS;
    session->bytes = sizeof(struct row) << row_bits;
    strcpy(session->directory, directory);
    char path[PATH_MAX];
    void *mapped;
    join(path, directory, "counters.bin");
    int error = map_file(path, sizeof *counters, counters, &mapped);
    if (!error)
        error = prepare(session, 0);
    if (error) {
        release(session, 0, 1);
        syscall(SYS_munmap, session, sizeof *session);
        return error;
    }
    advance(session, 0);
    counters->lanes = LANES;
    counters->sums = SUMS;
    counters->row_bits = row_bits;
    atomic_store(&counters->next, 1);
    copytrace_threshold = threshold;
    current = session;
    atomic_store(&copytrace_control->session, session);
    return 0;
}

int copytrace_record_end(void) {
    if (atomic_exchange(&copytrace_control->session, NULL))
        return 1;
    abandon();
    return 0;
}

static int wait_for_threads(void) {
    int rounds = 0;
    for (size_t lane = 0; lane < sizeof lanes / sizeof *lanes; lane++)
        while (atomic_load(&lanes[lane].inside)) {
            if (++rounds > WAIT_ROUNDS)
                return 0;
            nanosleep(&(struct timespec){.tv_nsec = WAIT_NANOSECONDS}, NULL);
        }
    return 1;
}

/* Rows whose thread did not come to write them. */
static uint64_t unfinished(struct session *session, uint64_t next) {
    uint64_t count = 0;
    for (uint64_t sequence = 1; sequence < next; sequence++) {
        const struct row *rows = segment_rows(session, sequence >> session->row_bits);
        count += rows && !atomic_load(&rows[sequence & ((UINT64_C(1) << session->row_bits) - 1)].sequence);
    }
    return count;
}

struct totals copytrace_record_close(void) {
    struct session *session = current;
    int quiet = wait_for_threads();
    uint64_t next = atomic_load(&counters->next);
    if (!quiet)
        atomic_fetch_add(&counters->lost, unfinished(session, next));
    struct totals totals = {
        .lost = atomic_load(&counters->lost),
        .marks = atomic_load(&counters->marks),
        .lost_marks = atomic_load(&counters->lost_marks),
    };
    totals.moves = next - 1 - totals.marks - totals.lost;
    release(session, next, quiet);
    trim(session, next);
    if (quiet)
        syscall(SYS_munmap, session, sizeof *session);
    current = NULL;
    return totals;
}
