/* Rows go to memory mapped segment files, so that they outlive a killed process. What a hook runs here takes no lock,
   allocates nothing and may be interrupted by a signal whose handler moves bytes, too.

   The sequence is also the place: row n lies in segment n >> row_bits. The thread that takes the first row of a segment
   prepares those that follow, and a thread that finds none for its row prepares it itself, with a few system calls and a
   compare-and-swap; who comes second throws his own away. Rows are lost only when that fails.

   A session's memory is given back only when no thread is in it. A thread that takes a number is in the session until it has
   written the row of that number, or counted it as lost, or as late because the session had ended. So a session is quiet when
   the rows that were not written are as many as those counted. The upper bits of a number are its era: the beginning and the
   end of a session each begin one, and a number of another era does not touch the session. When a thread stays for too long,
   the memory is left to it, cut off from the files. */

#include "_transfers.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif

enum { PATH_ROOM = 1024, NAME_ROOM = 32 };
enum { ERA_SHIFT = 40, ERAS = 4, WAIT_ROUNDS = 4000, WAIT_NANOSECONDS = 250000 };

struct session {
    unsigned row_bits;
    size_t limit; /* segments */
    size_t bytes; /* of a segment */
    _Atomic size_t refused; /* 1 + the segment that could not be made: hooks do not try that one again */
    char directory[PATH_ROOM - NAME_ROOM]; /* short: a hook may run on a small stack */
    _Atomic(struct row *) segments[MAX_SEGMENTS];
};

struct control *copytrace_control;
_Atomic uint64_t copytrace_threshold = 1;

static struct counters *counters; /* one address for the life of the process: the session's file, else private zeros */
static struct session *current;

static _Alignas(128) _Atomic uint64_t next_number = 1;
static _Alignas(128) _Atomic uint64_t session_era;
static _Atomic uint64_t late[ERAS]; /* of the last few eras */
static uint64_t era;

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

static void put_digits(char *place, size_t number) {
    for (char *digit = place + 4; digit >= place; digit--, number /= 10)
        *digit = (char)('0' + number % 10);
}

static void segment_path(const struct session *session, size_t segment, char *path) {
    char name[] = "moves-00000.bin";
    put_digits(name + 6, segment);
    join(path, session->directory, name);
}

/* Of a segment that may yet turn out to be somebody else's. */
static void draft_path(const struct session *session, size_t segment, char *path) {
    static _Atomic size_t drafts;
    char name[] = "moves-00000.00000.bin";
    put_digits(name + 6, segment);
    put_digits(name + 12, atomic_fetch_add_explicit(&drafts, 1, memory_order_relaxed));
    join(path, session->directory, name);
}

static int open_file(const char *path, int flags) {
    return (int)syscall(SYS_openat, (long)AT_FDCWD, path, (long)(flags | O_CREAT | O_CLOEXEC | O_NOFOLLOW), 0600L);
}

/* Written, not only reserved: a full disk must be an error here and not a SIGBUS in a hook, and the first touch of a page that
   is in the cache costs a hook next to nothing. */
static int write_zeros(int descriptor, size_t size) {
    static char zeros[1 << 16];
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
    int error = write_zeros(descriptor, size);
    if (!error) {
        *mapped = map(address, size, MAP_SHARED | (address ? MAP_FIXED : 0), descriptor);
        error = *mapped == MAP_FAILED ? errno : 0;
    }
    syscall(SYS_close, (long)descriptor);
    return error;
}

void copytrace_append(const char *name, const char *text, size_t size) {
    char path[PATH_ROOM];
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
    char draft[PATH_ROOM], path[PATH_ROOM];
    void *mapped;
    draft_path(session, segment, draft);
    segment_path(session, segment, path);
    int error = map_file(draft, session->bytes, NULL, &mapped);
    struct row *none = NULL;
    if (!error && atomic_compare_exchange_strong(&session->segments[segment], &none, (struct row *)mapped)) {
        syscall(SYS_renameat2, (long)AT_FDCWD, draft, (long)AT_FDCWD, path, 0L);
        return 0;
    }
    syscall(SYS_unlinkat, (long)AT_FDCWD, draft, 0L);
    if (error)
        atomic_store(&session->refused, segment + 1);
    else
        syscall(SYS_munmap, mapped, session->bytes);
    return error;
}

/* What a segment holds stays in its file. */
static void let_go(const struct session *session, struct row *rows) {
    syscall(SYS_madvise, rows, session->bytes, (long)MADV_DONTNEED);
}

/* The spare segments are made ready, full ones leave our resident memory. */
static void advance(struct session *session, size_t segment) {
    for (size_t ahead = 1; ahead <= SPARE_SEGMENTS; ahead++)
        prepare(session, segment + ahead);
    struct row *full = segment >= 2 ? segment_rows(session, segment - 2) : NULL;
    if (full)
        let_go(session, full);
}

/* The place of a row, NULL when there is none for it. */
static struct row *place(struct session *session, uint64_t sequence) {
    size_t segment = sequence >> session->row_bits, at = sequence & (((size_t)1 << session->row_bits) - 1);
    struct row *rows = segment_rows(session, segment);
    if (!rows || !at) {
        int saved = errno;
        if (!rows && atomic_load(&session->refused) != segment + 1)
            prepare(session, segment);
        if (!at)
            advance(session, segment);
        rows = segment_rows(session, segment);
        errno = saved;
    }
    return rows ? rows + at : NULL;
}

/* --- what hooks and marks call ----------------------------------------------------------------------------------------- */

static uint64_t sequence_of(uint64_t number) {
    return number & ((UINT64_C(1) << ERA_SHIFT) - 1);
}

/* Takes a number and returns its sequence, 0 when nothing is recorded. A row that finds no place is counted in lost. */
static uint64_t append(enum kind kind, uint64_t source, uint64_t destination, uint64_t size, uintptr_t caller,
                       _Atomic uint64_t *lost) {
    uint64_t number = atomic_fetch_add(&next_number, 1), sequence = sequence_of(number);
    struct session *session = atomic_load(&copytrace_control->session);
    if (!session || atomic_load(&session_era) != number >> ERA_SHIFT) {
        atomic_fetch_add(&late[(number >> ERA_SHIFT) % ERAS], 1);
        return 0;
    }
    struct row *row = place(session, sequence);
    if (!row) {
        atomic_fetch_add(lost, 1);
        return sequence;
    }
    row->thread = (uint64_t)pthread_self();
    row->source = source;
    row->destination = destination;
    row->kind_and_size = (uint64_t)kind << KIND_SHIFT | size;
    row->caller = caller;
    atomic_store_explicit(&row->sequence, sequence, memory_order_release);
    return sequence;
}

void copytrace_keep(enum kind kind, uint64_t source, uint64_t destination, uint64_t size, uintptr_t caller) {
    append(kind, source, destination, size, caller, &counters->lost);
}

uint64_t copytrace_mark(uint64_t span, uint64_t *count) {
    struct session *session = atomic_load(&copytrace_control->session);
    if (!session)
        return 0;
    if (atomic_load_explicit(&session->refused, memory_order_relaxed))
        atomic_store(&session->refused, 0); /* there may be room again */
    *count = atomic_fetch_add_explicit(&counters->marks, 1, memory_order_relaxed);
    return append(MARK, span, 0, 0, 0, &counters->lost_marks);
}

uint64_t copytrace_sequence(void) {
    return sequence_of(atomic_load(&next_number)) - 1;
}

uint64_t copytrace_marks(void) {
    return atomic_load(&counters->marks);
}

/* --- small moves ------------------------------------------------------------------------------------------------------- */

/* Whether an entry is that of key, which takes it when it is free. */
static int claim(_Atomic uint64_t *entry, uint64_t key) {
    uint64_t owner = atomic_load_explicit(entry, memory_order_relaxed);
    return owner == key || (!owner && (atomic_compare_exchange_strong(entry, &owner, key) || owner == key));
}

static struct sum *find_sum(struct sum *sums, unsigned bits, uint64_t caller) {
    unsigned first = hash(caller, bits);
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct sum *sum = &sums[(first + probe) & ((1u << bits) - 1)];
        if (claim(&sum->caller, caller))
            return sum;
    }
    return NULL;
}

static struct sum *own_sums(void) {
    uint64_t thread = (uint64_t)pthread_self();
    unsigned first = hash(thread, LANE_BITS);
    for (unsigned probe = 0; probe < LANE_PROBES; probe++) {
        unsigned lane = (first + probe) & (LANES - 1);
        if (claim(&counters->owners[lane], thread))
            return counters->own[lane];
    }
    return NULL;
}

/* Of a sum that only this thread and its signal handlers change: one instruction is enough. */
static void add_alone(_Atomic uint64_t *sum, uint64_t value) {
#if defined(__x86_64__)
    __asm__ volatile("addq %1, %0" : "+m"(*sum) : "r"(value) : "cc");
#else
    atomic_fetch_add_explicit(sum, value, memory_order_relaxed);
#endif
}

void copytrace_add_small(uint64_t size, uintptr_t caller) {
    struct sum *sums = own_sums(), *sum = sums ? find_sum(sums, OWN_BITS, caller) : NULL;
    if (sum) {
        add_alone(&sum->moves, 1);
        add_alone(&sum->bytes, size);
        return;
    }
    sum = find_sum(counters->shared, SHARED_BITS, caller);
    if (!sum)
        sum = &counters->others;
    atomic_fetch_add_explicit(&sum->moves, 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&sum->bytes, size, memory_order_relaxed);
}

/* --- sessions ---------------------------------------------------------------------------------------------------------- */

/* Begins an era; returns the sequence that would have been the next of the last one. */
static uint64_t begin_era(void) {
    era = (era + 1) & ((UINT64_C(1) << (64 - ERA_SHIFT)) - 1);
    atomic_store(&late[era % ERAS], 0);
    return sequence_of(atomic_exchange(&next_number, era << ERA_SHIFT | 1));
}

static size_t prepared_limit(const struct session *session, uint64_t next) {
    size_t limit = (next >> session->row_bits) + SPARE_SEGMENTS + 1;
    return limit < session->limit ? limit : session->limit;
}

/* Cuts the memory of a session off from its files; a thread may still write there. */
static void detach(struct session *session, uint64_t next) {
    for (size_t segment = 0; segment < prepared_limit(session, next); segment++)
        if (segment_rows(session, segment))
            map_zeros(segment_rows(session, segment), session->bytes);
    map_zeros(counters, sizeof *counters);
}

/* Gives it back. A child that is forked meanwhile finds no address here that is another's by then. */
static void release(struct session *session, uint64_t next) {
    current = NULL;
    for (size_t segment = 0; segment < prepared_limit(session, next); segment++)
        if (segment_rows(session, segment))
            syscall(SYS_munmap, segment_rows(session, segment), session->bytes);
    syscall(SYS_munmap, session, sizeof *session);
    map_zeros(counters, sizeof *counters);
}

static void trim(const struct session *session, uint64_t next) {
    char path[PATH_ROOM];
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
    uint64_t next = begin_era();
    if (current)
        detach(current, next);
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
    char path[PATH_ROOM];
    void *mapped;
    join(path, directory, "counters.bin");
    int error = map_file(path, sizeof *counters, counters, &mapped);
    if (!error)
        error = prepare(session, 0);
    if (error) {
        release(session, 0);
        return error;
    }
    advance(session, 0);
    counters->row_bits = row_bits;
    counters->sums_at = offsetof(struct counters, own);
    counters->sum_count = (sizeof *counters - offsetof(struct counters, own)) / sizeof(struct sum);
    atomic_store_explicit(&copytrace_threshold, threshold, memory_order_relaxed);
    current = session;
    begin_era();
    atomic_store(&session_era, era);
    atomic_store(&copytrace_control->session, session);
    return 0;
}

int copytrace_record_end(void) {
    if (atomic_exchange(&copytrace_control->session, NULL)) {
        counters->next = begin_era();
        return 1;
    }
    abandon();
    return 0;
}

/* How many of the sequences below next have no row. */
static uint64_t unwritten(struct session *session, uint64_t next) {
    uint64_t count = 0, in_segment = UINT64_C(1) << session->row_bits;
    for (uint64_t first = 0; first < next; first += in_segment) {
        struct row *rows = segment_rows(session, first >> session->row_bits);
        for (uint64_t at = first == 0; at < in_segment && first + at < next; at++)
            count += !rows || !atomic_load_explicit(&rows[at].sequence, memory_order_acquire);
        if (rows)
            let_go(session, rows);
    }
    return count;
}

struct totals copytrace_record_close(void) {
    struct session *session = current;
    uint64_t next = counters->next;
    _Atomic uint64_t *too_late = &late[atomic_load(&session_era) % ERAS];
    struct totals totals;
    int quiet = 0;
    for (int round = 0; !quiet; round++) {
        uint64_t missing = unwritten(session, next);
        totals.lost = atomic_load(&counters->lost);
        totals.lost_marks = atomic_load(&counters->lost_marks);
        totals.marks = atomic_load(&counters->marks);
        counters->late = atomic_load(too_late);
        uint64_t accounted = totals.lost + totals.lost_marks + counters->late;
        totals.moves = next - 1 - missing - (totals.marks - totals.lost_marks);
        quiet = missing == accounted;
        if (!quiet && round == WAIT_ROUNDS) {
            atomic_store(&counters->lost, totals.lost += missing > accounted ? missing - accounted : 0);
            break;
        }
        if (!quiet)
            nanosleep(&(struct timespec){.tv_nsec = WAIT_NANOSECONDS}, NULL);
    }
    if (!quiet)
        detach(session, next);
    trim(session, next);
    if (quiet)
        release(session, next);
    current = NULL;
    return totals;
}
