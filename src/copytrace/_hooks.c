/* Stand-ins for the functions of libc that move bytes. They call the real function, keep its errno and may run in any thread,
   in a signal handler, in a forked child and after the session. */

#include "_transfers.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <sys/auxv.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#define CALLER ((uintptr_t)__builtin_extract_return_addr(__builtin_return_address(0)))

static inline __attribute__((always_inline)) int active(void) {
    return atomic_load_explicit(&copytrace_control->session, memory_order_relaxed) != NULL;
}

static inline __attribute__((always_inline)) void moved(enum kind kind, uint64_t source, uint64_t destination, size_t size,
                                                        uintptr_t caller) {
    if (size >= atomic_load_explicit(&copytrace_threshold, memory_order_relaxed))
        copytrace_keep(kind, source, destination, size, caller);
    else
        copytrace_add_small(size, caller);
}

/* Before the call, which then is the last thing the hook does: a copy that is asked for takes place. */
static inline __attribute__((always_inline)) void copied(const void *source, const void *destination, size_t size,
                                                         uintptr_t caller) {
    if (active() && size && source != destination)
        moved(COPY, (uintptr_t)source, (uintptr_t)destination, size, caller);
}

static void passed(enum kind kind, int descriptor, const void *buffer, size_t size, uintptr_t caller) {
    uint64_t kernel = (unsigned)descriptor, memory = (uintptr_t)buffer;
    if (kind == FETCH)
        moved(kind, kernel, memory, size, caller);
    else
        moved(kind, memory, kernel, size, caller);
}

/* MSG_TRUNC returns more than the buffer holds. */
static inline ssize_t passed_one(enum kind kind, int descriptor, const void *buffer, size_t size, ssize_t result,
                                 uintptr_t caller) {
    if (result > 0 && size && active())
        passed(kind, descriptor, buffer, (size_t)result < size ? (size_t)result : size, caller);
    return result;
}

static inline ssize_t passed_many(enum kind kind, int descriptor, const struct iovec *pieces, size_t count, ssize_t result,
                                  uintptr_t caller) {
    size_t left = result > 0 && active() ? (size_t)result : 0;
    for (size_t i = 0; i < count && left; i++) {
        size_t size = pieces[i].iov_len < left ? pieces[i].iov_len : left;
        if (size)
            passed(kind, descriptor, pieces[i].iov_base, size, caller);
        left -= size;
    }
    return result;
}

/* --- the hooks: real_NAME is what hook_NAME calls ---------------------------------------------------------------------- */

#define HOOK(result, name, ...)                                                                                              \
    static result (*real_##name)(__VA_ARGS__);                                                                               \
    static result hook_##name(__VA_ARGS__)

HOOK(void *, memmove, void *destination, const void *source, size_t size) {
    copied(source, destination, size, CALLER);
    return real_memmove(destination, source, size);
}

/* memcpy@GLIBC_2.2.5 allows an overlap, so memmove stands in for both. */
HOOK(void *, memcpy, void *destination, const void *source, size_t size) {
    copied(source, destination, size, CALLER);
    return real_memmove(destination, source, size);
}

HOOK(void *, mempcpy, void *destination, const void *source, size_t size) {
    copied(source, destination, size, CALLER);
    return real_mempcpy(destination, source, size);
}

HOOK(void *, __memcpy_chk, void *destination, const void *source, size_t size, size_t room) {
    copied(source, destination, size, CALLER);
    return real___memcpy_chk(destination, source, size, room);
}

HOOK(void *, __memmove_chk, void *destination, const void *source, size_t size, size_t room) {
    copied(source, destination, size, CALLER);
    return real___memmove_chk(destination, source, size, room);
}

HOOK(void *, __mempcpy_chk, void *destination, const void *source, size_t size, size_t room) {
    copied(source, destination, size, CALLER);
    return real___mempcpy_chk(destination, source, size, room);
}

#define ONE(kind, name, buffer_type, parameters, arguments)                                                                  \
    HOOK(ssize_t, name, int descriptor, buffer_type buffer, size_t size UNPACK parameters) {                                 \
        return passed_one(kind, descriptor, buffer, size, real_##name(descriptor, buffer, size UNPACK arguments), CALLER);   \
    }
#define MANY(kind, name, parameters, arguments)                                                                              \
    HOOK(ssize_t, name, int descriptor, const struct iovec *pieces, int count UNPACK parameters) {                           \
        ssize_t result = real_##name(descriptor, pieces, count UNPACK arguments);                                            \
        return passed_many(kind, descriptor, pieces, count > 0 ? (size_t)count : 0, result, CALLER);                         \
    }
#define MESSAGE(kind, name, message_type)                                                                                    \
    HOOK(ssize_t, name, int descriptor, message_type message, int flags) {                                                   \
        ssize_t result = real_##name(descriptor, message, flags);                                                            \
        return result > 0 ? passed_many(kind, descriptor, message->msg_iov, message->msg_iovlen, result, CALLER) : result;   \
    }
#define UNPACK(...) __VA_OPT__(, ) __VA_ARGS__

ONE(FETCH, read, void *, (), ())
ONE(FETCH, __read_chk, void *, (size_t room), (room))
ONE(FETCH, pread, void *, (off_t offset), (offset))
ONE(FETCH, __pread_chk, void *, (off_t offset, size_t room), (offset, room))
MANY(FETCH, readv, (), ())
MANY(FETCH, preadv, (off_t offset), (offset))
MANY(FETCH, preadv2, (off_t offset, int flags), (offset, flags))
ONE(FETCH, recv, void *, (int flags), (flags))
ONE(FETCH, __recv_chk, void *, (size_t room, int flags), (room, flags))
ONE(FETCH, recvfrom, void *, (int flags, struct sockaddr *peer, socklen_t *length), (flags, peer, length))
ONE(FETCH, __recvfrom_chk, void *, (size_t room, int flags, struct sockaddr *peer, socklen_t *length),
    (room, flags, peer, length))
MESSAGE(FETCH, recvmsg, struct msghdr *)

ONE(FLUSH, write, const void *, (), ())
ONE(FLUSH, pwrite, const void *, (off_t offset), (offset))
MANY(FLUSH, writev, (), ())
MANY(FLUSH, pwritev, (off_t offset), (offset))
MANY(FLUSH, pwritev2, (off_t offset, int flags), (offset, flags))
ONE(FLUSH, send, const void *, (int flags), (flags))
ONE(FLUSH, sendto, const void *, (int flags, const struct sockaddr *peer, socklen_t length), (flags, peer, length))
MESSAGE(FLUSH, sendmsg, const struct msghdr *)

/* libc passes what is large straight from the file to the buffer, or the other way, without another library's slot. */
static size_t streamed(enum kind kind, FILE *stream, const void *buffer, size_t size, size_t items, uintptr_t caller) {
    int saved = errno, descriptor = items && active() ? fileno(stream) : -1;
    errno = saved; /* a stream in memory has no descriptor */
    passed_one(kind, descriptor, buffer, items * size, (ssize_t)(items * size), caller);
    return items;
}

#define STREAM(kind, name, buffer_type)                                                                                      \
    HOOK(size_t, name, buffer_type buffer, size_t size, size_t count, FILE *stream) {                                        \
        return streamed(kind, stream, buffer, size, real_##name(buffer, size, count, stream), CALLER);                       \
    }

STREAM(FETCH, fread, void *)
STREAM(FETCH, fread_unlocked, void *)
STREAM(FLUSH, fwrite, const void *)
STREAM(FLUSH, fwrite_unlocked, const void *)
HOOK(size_t, __fread_chk, void *buffer, size_t room, size_t size, size_t count, FILE *stream) {
    return streamed(FETCH, stream, buffer, size, real___fread_chk(buffer, room, size, count, stream), CALLER);
}

#define CALL(name) {#name, (uintptr_t)hook_##name, (uintptr_t *)&real_##name, 0}
#define ALIAS(alias, name) {alias, (uintptr_t)hook_##name, (uintptr_t *)&real_##name, 0}

struct call copytrace_calls[] = {
    CALL(memmove),
    CALL(memcpy),
    CALL(mempcpy),
    CALL(__memcpy_chk),
    CALL(__memmove_chk),
    CALL(__mempcpy_chk),
    CALL(read),
    CALL(__read_chk),
    CALL(pread),
    CALL(__pread_chk),
    CALL(readv),
    CALL(preadv),
    CALL(preadv2),
    CALL(recv),
    CALL(__recv_chk),
    CALL(recvfrom),
    CALL(__recvfrom_chk),
    CALL(recvmsg),
    CALL(write),
    CALL(pwrite),
    CALL(writev),
    CALL(pwritev),
    CALL(pwritev2),
    CALL(send),
    CALL(sendto),
    CALL(sendmsg),
    CALL(fread),
    CALL(fread_unlocked),
    CALL(__fread_chk),
    CALL(fwrite),
    CALL(fwrite_unlocked),
    ALIAS("__mempcpy", mempcpy),
    ALIAS("pread64", pread),
    ALIAS("__pread64_chk", __pread_chk),
    ALIAS("preadv64", preadv),
    ALIAS("preadv64v2", preadv2),
    ALIAS("pwrite64", pwrite),
    ALIAS("pwritev64", pwritev),
    ALIAS("pwritev64v2", pwritev2),
};
const size_t copytrace_call_count = sizeof copytrace_calls / sizeof *copytrace_calls;

/* Of a program that is not position independent a lookup may find its own linkage stub, which runs through a slot that we
   patch: then the next definition is the real one. */
static int in_program(uintptr_t address) {
    Dl_info program, found;
    return dladdr((void *)getauxval(AT_PHDR), &program) && dladdr((void *)address, &found)
           && program.dli_fbase == found.dli_fbase;
}

void copytrace_hooks_initialise(void) {
    for (size_t i = 0; i < copytrace_call_count; i++) {
        struct call *call = &copytrace_calls[i];
        call->global = (uintptr_t)dlsym(RTLD_DEFAULT, call->name);
        if (call->global)
            *call->real = in_program(call->global) ? (uintptr_t)dlsym(RTLD_NEXT, call->name) : call->global;
    }
}
