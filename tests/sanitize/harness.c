/* The recorder without Python, for sanitizers: every hook once with known moves, then sessions that open and close while
   threads copy, libraries come and go and children are forked.

   harness SECONDS DIRECTORY MOVES.so [MORE.so ...] */

#include "_transfers.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                                     \
    do {                                                                                                                     \
        if (!(condition)) {                                                                                                  \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);                                \
            exit(1);                                                                                                         \
        }                                                                                                                    \
    } while (0)

enum { ROW_BITS = 10, BLOCK = 1 << 16, LONG = 300 };

struct step { /* as in moves.c */
    uint32_t call;
    int32_t descriptor;
    char *source, *destination;
    uint64_t size, pieces;
    int64_t offset, result;
};

typedef void mover(struct step *);

static const char *directory, **libraries;
static int library_count;
static void *moves;
static _Atomic int going = 1;
static _Atomic unsigned long loads, forks;

static void *symbol(const char *name) {
    void *found = dlsym(moves, name);
    CHECK(found);
    return found;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void rest(long microseconds) {
    nanosleep(&(struct timespec){.tv_nsec = microseconds * 1000}, NULL);
}

/* --- sessions ---------------------------------------------------------------------------------------------------------- */

static void spool_of(char *path, unsigned number) {
    snprintf(path, LONG, "%s/%u", directory, number);
}

static void patch(int first) {
    for (int round = 0; round < 20; round++) {
        copytrace_slots_settle();
        if (!copytrace_slots_patch(first))
            return;
    }
}

static void open_session(unsigned number, uint64_t threshold) {
    char path[LONG];
    spool_of(path, number);
    CHECK(!mkdir(path, 0700));
    CHECK(!copytrace_record_open(path, threshold, ROW_BITS, MAX_SEGMENTS));
    patch(1);
}

static struct totals close_session(void) {
    CHECK(copytrace_record_end() == 1);
    copytrace_slots_restore();
    return copytrace_record_close();
}

struct found {
    uint64_t rows[MARK + 1], bytes[MARK + 1], last;
};

static void remove_file(const char *spool, const char *name) {
    char path[2 * LONG];
    snprintf(path, sizeof path, "%s/%s", spool, name);
    unlink(path);
}

/* Reads what a session wrote, and removes it. */
static struct found read_session(unsigned number) {
    struct found found = {{0}, {0}, 0};
    char spool[LONG], path[2 * LONG], name[32];
    spool_of(spool, number);
    for (unsigned segment = 0;; segment++) {
        snprintf(name, sizeof name, "moves-%05u.bin", segment);
        snprintf(path, sizeof path, "%s/%s", spool, name);
        FILE *file = fopen(path, "rb");
        if (!file)
            break;
        struct row row;
        for (uint64_t n = 0; fread(&row, sizeof row, 1, file); n++) {
            uint64_t sequence = atomic_load(&row.sequence), kind = row.kind_and_size >> KIND_SHIFT;
            if (!sequence)
                continue;
            CHECK(sequence == ((uint64_t)segment << ROW_BITS) + n && kind <= MARK);
            found.rows[kind]++;
            found.bytes[kind] += row.kind_and_size & ((UINT64_C(1) << KIND_SHIFT) - 1);
            found.last = sequence;
        }
        fclose(file);
        remove_file(spool, name);
    }
    remove_file(spool, "counters.bin");
    remove_file(spool, "objects.tsv");
    CHECK(!rmdir(spool));
    return found;
}

/* --- every hook once --------------------------------------------------------------------------------------------------- */

static char left[BLOCK], right[BLOCK];

static void move(const char *name, int descriptor, uint64_t size, int64_t result) {
    char full[64];
    snprintf(full, sizeof full, "moves_%s", name);
    struct step step = {0, descriptor, left, right, size, 3, 0, 0};
    ((mover *)symbol(full))(&step);
    CHECK(result < 0 ? step.result != 0 : step.result == result);
}

static void each_hook(void) {
    static const char *const copies[] = {"memcpy",     "memmove",     "mempcpy", "memcpy_chk", "memmove_chk",
                                         "mempcpy_chk", "pointer"};
    static const char *const pairs[][2] = {{"write", "read"},     {"writev", "readv"},      {"send", "recv"},
                                           {"sendto", "recvfrom"}, {"sendmsg", "recvmsg"},  {"write", "read_chk"},
                                           {"send", "recv_chk"}};
    static const char *const placed[][2] = {
        {"pwrite", "pread"}, {"pwritev", "preadv"}, {"pwritev2", "preadv2"}, {"pwrite", "pread_chk"}};
    char path[LONG];
    int ends[2];
    snprintf(path, sizeof path, "%s/file", directory);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && !socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    open_session(0, 1000);
    uint64_t count;
    CHECK(copytrace_mark(5, &count) && count == 0);
    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++) {
        move(copies[i], -1, 5000, -1);
        move(copies[i], -1, 10, -1);
    }
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        move(pairs[i][0], ends[0], 6000, 6000);
        move(pairs[i][1], ends[1], 7000, 6000);
    }
    for (size_t i = 0; i < sizeof placed / sizeof *placed; i++) {
        move(placed[i][0], file, 6000, 6000);
        move(placed[i][1], file, 6000, 6000);
    }
    move("read", -1, 5000, -1);
    move("recvmsg", -1, 5000, -1);
    struct totals totals = close_session();
    struct found found = read_session(0);
    CHECK(found.rows[COPY] >= 7 && found.bytes[COPY] >= 35000);
    CHECK(found.bytes[FETCH] == 11 * 6000 && found.bytes[FLUSH] == 11 * 6000);
    CHECK(found.rows[MARK] == 1 && totals.marks == 1 && totals.lost == 0 && totals.lost_marks == 0);
    CHECK(found.rows[COPY] + found.rows[FETCH] + found.rows[FLUSH] == totals.moves);
    close(file);
    close(ends[0]);
    close(ends[1]);
    unlink(path);
}

/* --- all at once ------------------------------------------------------------------------------------------------------- */

static void *load_and_unload(void *unused) {
    (void)unused;
    while (going)
        for (int i = 0; i < library_count; i++) {
            static char source[BLOCK], destination[BLOCK];
            void *library = dlopen(libraries[i], RTLD_NOW);
            CHECK(library);
            struct step step = {.source = source, .destination = destination, .size = 8000, .pieces = 1};
            mover *mover = dlsym(library, "moves_memmove");
            CHECK(mover);
            mover(&step);
            rest(500);
            mover(&step);
            dlclose(library);
            loads++;
        }
    return NULL;
}

static void *fork_children(void *unused) {
    (void)unused;
    mover *copy = symbol("moves_memcpy");
    while (going) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (!child) {
            struct step step = {.source = left, .destination = right, .size = 5000, .pieces = 1};
            uint64_t count;
            for (int i = 0; i < 1000; i++)
                copy(&step);
            _exit(copytrace_mark(1, &count) ? 3 : 0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        if (status)
            fprintf(stderr, "a child ended with status %#x\n", (unsigned)status);
        CHECK(status == 0);
        forks++;
        rest(5000);
    }
    return NULL;
}

static void count_ours(void *data, const char *object, const char *name, uintptr_t address, uintptr_t value) {
    (void)object, (void)name, (void)address;
    for (size_t i = 0; i < copytrace_call_count; i++)
        *(unsigned *)data += value == copytrace_calls[i].hook;
}

int main(int argc, char **argv) {
    CHECK(argc >= 4);
    double seconds = atof(argv[1]);
    directory = argv[2];
    libraries = (const char **)argv + 4;
    library_count = argc - 4;
    CHECK((moves = dlopen(argv[3], RTLD_NOW)));
    CHECK(!copytrace_record_initialise());
    copytrace_hooks_initialise();
    copytrace_slots_initialise();
    each_hook();
    pthread_t loader, forker;
    CHECK(!((int (*)(uint64_t))symbol("moves_start_workers"))(8));
    CHECK(!pthread_create(&loader, NULL, load_and_unload, NULL) && !pthread_create(&forker, NULL, fork_children, NULL));
    uint64_t rows = 0;
    unsigned sessions = 0, ours = 0;
    for (double end = now() + seconds; now() < end;) {
        open_session(++sessions, 4096);
        for (unsigned n = 0; n < sessions % 30; n++) {
            uint64_t count;
            if (copytrace_slots_stale())
                patch(0);
            CHECK(copytrace_mark(n, &count) && count == n);
            rest(300);
        }
        struct totals totals = close_session();
        struct found found = read_session(sessions);
        CHECK(found.rows[COPY] + found.rows[FETCH] + found.rows[FLUSH] == totals.moves);
        CHECK(found.rows[MARK] == sessions % 30 && totals.marks == sessions % 30);
        if (totals.lost || totals.lost_marks)
            fprintf(stderr, "lost %lu moves, %lu marks\n", (unsigned long)totals.lost, (unsigned long)totals.lost_marks);
        CHECK(totals.lost == 0 && totals.lost_marks == 0);
        rows += totals.moves;
    }
    going = 0;
    pthread_join(loader, NULL);
    pthread_join(forker, NULL);
    CHECK(((uint64_t(*)(void))symbol("moves_stop_workers"))() > 0);
    copytrace_slots_visit(count_ours, &ours);
    CHECK(ours == 0);
    printf("%u sessions, %lu moves, %lu loads, %lu forks\n", sessions, (unsigned long)rows, (unsigned long)loads,
           (unsigned long)forks);
    return 0;
}
