/* Moves that a test knows beforehand: each call of libc has a function of its own, which runs it as a step says. No Python. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef __GLIBC__
extern void *__memcpy_chk(void *, const void *, size_t, size_t);
extern void *__memmove_chk(void *, const void *, size_t, size_t);
extern void *__mempcpy_chk(void *, const void *, size_t, size_t);
extern ssize_t __read_chk(int, void *, size_t, size_t);
extern ssize_t __pread_chk(int, void *, size_t, off_t, size_t);
extern ssize_t __recv_chk(int, void *, size_t, size_t, int);
#else /* musl has none of these */
#define PLAIN(result, name, parameters, call)                                                                                \
    static inline __attribute__((always_inline)) result name parameters {                                                    \
        return call;                                                                                                         \
    }
PLAIN(void *, __memcpy_chk, (void *to, const void *from, size_t size, size_t room), ((void)room, memcpy(to, from, size)))
PLAIN(void *, __memmove_chk, (void *to, const void *from, size_t size, size_t room), ((void)room, memmove(to, from, size)))
PLAIN(void *, __mempcpy_chk, (void *to, const void *from, size_t size, size_t room), ((void)room, mempcpy(to, from, size)))
PLAIN(ssize_t, __read_chk, (int descriptor, void *to, size_t size, size_t room), ((void)room, read(descriptor, to, size)))
PLAIN(ssize_t, __pread_chk, (int descriptor, void *to, size_t size, off_t offset, size_t room),
      ((void)room, pread(descriptor, to, size, offset)))
PLAIN(ssize_t, __recv_chk, (int descriptor, void *to, size_t size, size_t room, int flags),
      ((void)room, recv(descriptor, to, size, flags)))
#define preadv2(descriptor, pieces, count, offset, flags) preadv(descriptor, pieces, count, offset)
#define pwritev2(descriptor, pieces, count, offset, flags) pwritev(descriptor, pieces, count, offset)
#endif

struct step {
    uint32_t call;
    int32_t descriptor;
    char *source, *destination;
    uint64_t size;
    uint64_t pieces; /* of a vector */
    int64_t offset;  /* in a file; or the stream */
    int64_t result;
};

enum { MOST_PIECES = 64 };

static int cut(const struct step *step, char *start, struct iovec *pieces) {
    uint64_t count = step->pieces, each = step->size / count;
    for (uint64_t i = 0; i < count; i++)
        pieces[i] = (struct iovec){start + i * each, i + 1 < count ? each : step->size - i * each};
    return (int)count;
}

static void *(*const volatile table[])(void *, const void *, size_t) = {memcpy, memmove};

#define MOVER(name, expression)                                                                                              \
    __attribute__((noinline)) void moves_##name(struct step *step) {                                                         \
        struct iovec pieces[MOST_PIECES];                                                                                    \
        struct msghdr message = {.msg_iov = pieces};                                                                         \
        (void)message;                                                                                                       \
        step->result = (int64_t)(expression);                                                                                \
    }
#define INTO step->destination, step->size
#define FROM step->source, step->size
#define OUT step->descriptor, step->destination, step->size
#define IN step->descriptor, step->source, step->size

MOVER(memcpy, memcpy(step->destination, FROM))
MOVER(memmove, memmove(step->destination, FROM))
MOVER(mempcpy, mempcpy(step->destination, FROM))
MOVER(memcpy_chk, __memcpy_chk(step->destination, FROM, step->size))
MOVER(memmove_chk, __memmove_chk(step->destination, FROM, step->size))
MOVER(mempcpy_chk, __mempcpy_chk(step->destination, FROM, step->size))
MOVER(pointer, table[1](step->destination, FROM))
MOVER(read, read(OUT))
MOVER(read_chk, __read_chk(OUT, step->size))
MOVER(pread, pread(OUT, step->offset))
MOVER(pread_chk, __pread_chk(OUT, step->offset, step->size))
MOVER(readv, readv(step->descriptor, pieces, cut(step, step->destination, pieces)))
MOVER(preadv, preadv(step->descriptor, pieces, cut(step, step->destination, pieces), step->offset))
MOVER(preadv2, preadv2(step->descriptor, pieces, cut(step, step->destination, pieces), step->offset, 0))
MOVER(recv, recv(OUT, 0))
MOVER(recv_chk, __recv_chk(OUT, step->size, 0))
MOVER(recvfrom, recvfrom(OUT, 0, NULL, NULL))
MOVER(recvmsg, (message.msg_iovlen = (size_t)cut(step, step->destination, pieces), recvmsg(step->descriptor, &message, 0)))
MOVER(write, write(IN))
MOVER(pwrite, pwrite(IN, step->offset))
MOVER(writev, writev(step->descriptor, pieces, cut(step, step->source, pieces)))
MOVER(pwritev, pwritev(step->descriptor, pieces, cut(step, step->source, pieces), step->offset))
MOVER(pwritev2, pwritev2(step->descriptor, pieces, cut(step, step->source, pieces), step->offset, 0))
MOVER(send, send(IN, 0))
MOVER(sendto, sendto(IN, 0, NULL, 0))
MOVER(fread, fread(step->destination, 1, step->size, (FILE *)step->offset))
MOVER(fwrite, fwrite(step->source, 1, step->size, (FILE *)step->offset))
MOVER(sendmsg, (message.msg_iovlen = (size_t)cut(step, step->source, pieces), sendmsg(step->descriptor, &message, 0)))

/* A function that no dynamic symbol names. */
static __attribute__((noinline)) void hidden_copy(struct step *step) {
    step->result = (int64_t)memcpy(step->destination, FROM);
    __asm__ volatile("" ::: "memory");
}

typedef void mover(struct step *);
static mover *const movers[] = {
    moves_memcpy,  moves_memmove, moves_mempcpy,   moves_memcpy_chk, moves_memmove_chk, moves_mempcpy_chk, moves_pointer,
    hidden_copy,   moves_read,    moves_read_chk,  moves_pread,      moves_pread_chk,   moves_readv,       moves_preadv,
    moves_preadv2, moves_recv,    moves_recv_chk,  moves_recvfrom,   moves_recvmsg,     moves_write,       moves_pwrite,
    moves_writev,  moves_pwritev, moves_pwritev2,  moves_send,       moves_sendto,      moves_sendmsg,
    moves_fread,   moves_fwrite,
};

struct program {
    struct step *steps;
    uint64_t count;
    uint64_t thread;
};

void moves_run(struct program *program) {
    program->thread = (uint64_t)pthread_self();
    for (uint64_t i = 0; i < program->count; i++)
        movers[program->steps[i].call](&program->steps[i]);
}

/* One step a level, each before the deeper ones. */
uint64_t moves_recurse(struct step *steps, uint64_t count) {
    if (!count)
        return 0;
    movers[steps->call](steps);
    return 1 + moves_recurse(steps + 1, count - 1);
}

static void *run_in_thread(void *program) {
    moves_run(program);
    return NULL;
}

/* Each program in a native thread of its own, at the same time. */
int moves_run_threads(struct program *programs, uint64_t count) {
    pthread_t threads[64];
    for (uint64_t i = 0; i < count; i++)
        if (pthread_create(&threads[i], NULL, run_in_thread, &programs[i]))
            return 1;
    for (uint64_t i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

void moves_repeat(struct step *step, uint64_t times) {
    for (uint64_t i = 0; i < times; i++)
        movers[step->call](step);
}

/* Of processor time, a step. */
double moves_nanoseconds(struct step *step, uint64_t times) {
    struct timespec start, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    moves_repeat(step, times);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    return ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / (double)times;
}

/* errno after a read that fails and after a copy. */
int moves_errno_of_bad_read(struct step *step) {
    errno = 0;
    moves_read(step);
    return errno;
}

int moves_errno_after_copy(struct step *step, int before) {
    errno = before;
    moves_memcpy(step);
    return errno;
}

void *moves_realloc(void *block, uint64_t size) {
    return realloc(block, size);
}

/* A child that no fork handler prepares: it copies and ends. Returns its exit status. */
int moves_in_raw_child(struct step *step, uint64_t times) {
    int status;
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0L, 0L, 0L, 0L);
    if (!child) {
        moves_repeat(step, times);
        _exit(7);
    }
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* --- a handler that copies --------------------------------------------------------------------------------------------- */

static struct step *handled;

static void copy_in_handler(int number) {
    (void)number;
    moves_memmove(handled);
}

/* Copies outer, raising SIGUSR1 between any two, whose handler copies inner. */
int moves_with_signals(struct step *outer, struct step *inner, uint64_t times) {
    struct sigaction action = {.sa_handler = copy_in_handler}, before;
    handled = inner;
    if (sigaction(SIGUSR1, &action, &before))
        return 1;
    for (uint64_t i = 0; i < times; i++) {
        moves_memcpy(outer);
        raise(SIGUSR1);
    }
    return sigaction(SIGUSR1, &before, NULL);
}

/* --- threads that copy until they are told to stop --------------------------------------------------------------------- */

enum { MOST_THREADS = 64, BLOCK = 1 << 16 };

static volatile int going;
static pthread_t workers[MOST_THREADS];
static uint64_t worker_count, done[MOST_THREADS];

static void *work(void *argument) {
    uint64_t number = (uint64_t)argument;
    char *block = malloc(2 * BLOCK);
    memset(block, (int)number, 2 * BLOCK);
    for (uint64_t i = 0; going; i++) {
        struct step step = {.source = block, .destination = block + BLOCK, .size = i % 3 ? 64 + i % 64 : 4096 + i % 8192};
        moves_memcpy(&step);
        done[number]++;
        if (i % 64 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
    }
    free(block);
    return NULL;
}

int moves_start_workers(uint64_t count) {
    going = 1;
    for (worker_count = 0; worker_count < count; worker_count++) {
        done[worker_count] = 0;
        if (pthread_create(&workers[worker_count], NULL, work, (void *)worker_count))
            return 1;
    }
    return 0;
}

uint64_t moves_stop_workers(void) {
    uint64_t total = 0;
    going = 0;
    for (uint64_t i = 0; i < worker_count; i++) {
        pthread_join(workers[i], NULL);
        total += done[i];
    }
    return total;
}

/* --- a thread that stays inside a hook --------------------------------------------------------------------------------- */

static volatile uintptr_t hook_low, hook_high;
static volatile int holding, held;

static void hold_inside(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
#if defined(__x86_64__)
    uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
#else
    uintptr_t at = (uintptr_t)((ucontext_t *)context)->uc_mcontext.pc;
#endif
    if (at < hook_low || at >= hook_high || !holding)
        return;
    held = 1;
    while (holding)
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

/* Stops the first worker while its program counter is in [low, high). Returns 0 when it stands there. */
int moves_hold_worker(uintptr_t low, uintptr_t high) {
    struct sigaction action = {.sa_sigaction = hold_inside, .sa_flags = SA_SIGINFO};
    hook_low = low;
    hook_high = high;
    held = 0;
    holding = 1;
    if (sigaction(SIGUSR2, &action, NULL))
        return 1;
    for (int i = 0; i < 200000 && !held; i++) {
        pthread_kill(workers[0], SIGUSR2);
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
    return !held;
}

void moves_release_worker(void) {
    holding = 0;
}
