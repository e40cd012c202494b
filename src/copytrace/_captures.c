/* The Python module copytrace._captures: the records of a memray capture as rows of numbers, a block of them at a time.

   A capture is a header and a stream of records. The first byte of a record tells what it is, and flags; numbers follow as
   varints, many as the difference from the last of their kind. Stacks are told by what is pushed and popped on each thread.
   Read is the format of memray 1.20, which numbers it 13, as it is or packed by LZ4; any other is refused. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { VERSION = 13, COLUMNS = 5, RECENT = 15, MOST_FIXED = 64, MOST_AT_ONCE = 1 << 24 };
enum { FREE = 5, PYMALLOC_FREE = 1, MUNMAP = 15 };
enum record {
    FILLER = 0,
    TRAILER = 1,
    MEMORY = 2,
    NATIVE_FRAME = 5,
    MAPPINGS = 6,
    IMAGE = 7,
    SEGMENT = 8,
    THREAD_NAME = 10,
    THREAD = 12,
    CODE = 14,
    POP = 16,
    OBJECT = 32,
    PUSH = 64,
    ALLOCATION = 128,
};
enum outcome { READ, ENDED, FAILED };

/* --- numbers for keys --------------------------------------------------------------------------------------------------- */

struct numbers {
    uint64_t *keys;
    uint32_t *values; /* 0 where no key is */
    size_t room, count;
};

static size_t slot_of(const struct numbers *numbers, uint64_t key) {
    size_t slot = (key * 0x9E3779B97F4A7C15u) >> 20 & (numbers->room - 1);
    while (numbers->values[slot] && numbers->keys[slot] != key)
        slot = (slot + 1) & (numbers->room - 1);
    return slot;
}

static int widen(struct numbers *numbers) {
    struct numbers wider = {.room = numbers->room ? 2 * numbers->room : 1024, .count = numbers->count};
    wider.keys = PyMem_RawCalloc(wider.room, sizeof *wider.keys);
    wider.values = PyMem_RawCalloc(wider.room, sizeof *wider.values);
    if (!wider.keys || !wider.values) {
        PyMem_RawFree(wider.keys);
        PyMem_RawFree(wider.values);
        return -1;
    }
    for (size_t i = 0; i < numbers->room; i++)
        if (numbers->values[i]) {
            size_t slot = slot_of(&wider, numbers->keys[i]);
            wider.keys[slot] = numbers->keys[i];
            wider.values[slot] = numbers->values[i];
        }
    PyMem_RawFree(numbers->keys);
    PyMem_RawFree(numbers->values);
    *numbers = wider;
    return 0;
}

/* The number of a key, from 1 in the order of their coming; 0 for want of memory. */
static uint32_t number_of(struct numbers *numbers, uint64_t key, int *fresh) {
    *fresh = 0;
    if (2 * numbers->count >= numbers->room && widen(numbers))
        return 0;
    size_t slot = slot_of(numbers, key);
    if (!numbers->values[slot]) {
        if (numbers->count >= UINT32_MAX - 1)
            return 0;
        *fresh = 1;
        numbers->keys[slot] = key;
        numbers->values[slot] = (uint32_t)++numbers->count;
    }
    return numbers->values[slot];
}

struct list {
    void *items;
    size_t count, room;
};

/* Room for one more item, NULL for want of memory. */
static void *append(struct list *list, size_t size) {
    if (list->count == list->room) {
        size_t room = list->room ? 2 * list->room : 64;
        void *items = PyMem_RawRealloc(list->items, room * size);
        if (!items)
            return NULL;
        list->items = items;
        list->room = room;
    }
    return (char *)list->items + list->count++ * size;
}

/* --- what is packed by LZ4 ---------------------------------------------------------------------------------------------- */

enum { REACH = 1 << 16 }; /* how far back a block may refer */

struct packed {
    uint8_t *in, *out; /* a block as it is in the file, and unpacked after the REACH bytes before it */
    size_t room, before, at, end;
    int sums;
};

/* A length that goes on in bytes of 255. */
static int more_of(const uint8_t *in, size_t size, size_t *at, size_t *length) {
    uint8_t byte = 255;
    while (byte == 255) {
        if (*at >= size)
            return 0;
        byte = in[(*at)++];
        *length += byte;
    }
    return 1;
}

/* Unpacks a block to where `before` bytes precede it; how many bytes that made, -1 when it is damaged. */
static Py_ssize_t unpack(const uint8_t *in, size_t size, uint8_t *out, size_t before, size_t room) {
    size_t at = 0, made = 0;
    while (at < size) {
        uint8_t token = in[at++];
        size_t literal = token >> 4, match = (token & 15) + 4;
        if ((literal == 15 && !more_of(in, size, &at, &literal)) || literal > size - at || literal > room - made)
            return -1;
        memcpy(out + made, in + at, literal);
        at += literal;
        made += literal;
        if (at == size)
            return (Py_ssize_t)made;
        if (size - at < 2)
            return -1;
        size_t back = in[at] | (size_t)in[at + 1] << 8;
        at += 2;
        if ((match == 19 && !more_of(in, size, &at, &match)) || match > room - made || !back || back > made + before)
            return -1;
        for (; match; match--, made++)
            out[made] = out[made - back];
    }
    return -1;
}

/* --- the reader --------------------------------------------------------------------------------------------------------- */

struct frame {
    uint64_t code;
    int64_t offset;
    int entry;
};
struct node { /* of the tree of Python stacks, numbered from 1 */
    uint32_t parent, frame;
};
struct native { /* of the tree of native stacks, numbered from 1 */
    uint64_t address, parent;
};
struct stack {
    uint32_t node, generation;
    uint64_t native, thread;
};
struct thread {
    struct list nodes;
};

typedef struct {
    PyObject_HEAD
    int descriptor;
    uint8_t *buffer;
    size_t at, end, room;
    uint64_t unread; /* bytes of the file that were not read yet */
    struct packed packed;
    int native, ended, complete;
    int python_version;
    uint64_t main_thread, skipped, expected, found;
    uint64_t last_thread, last_instruction, last_data, last_native, recent[RECENT];
    int64_t last_line;
    struct numbers threads, frame_numbers, node_numbers, stack_numbers;
    struct list thread_list, frames, nodes, natives, stacks;
    struct thread *thread;
    PyObject *codes;  /* dict: number -> (function, file, first line, line table) */
    PyObject *images; /* list of generations: lists of (file, base, [(address, size)]) */
} Reader;

static enum outcome damaged(const char *what) {
    PyErr_Format(PyExc_ValueError, "damaged: %s", what);
    return FAILED;
}

static enum outcome no_memory(void) {
    PyErr_NoMemory();
    return FAILED;
}

static size_t read_file(Reader *reader, uint8_t *into, size_t most) {
    size_t done = 0;
    while (done < most && reader->unread) {
        size_t wanted = most - done < reader->unread ? most - done : (size_t)reader->unread;
        ssize_t count = read(reader->descriptor, into + done, wanted);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            reader->unread = 0;
            break;
        }
        done += (size_t)count;
        reader->unread -= (uint64_t)count;
    }
    return done;
}

static uint32_t read_word(Reader *reader) {
    uint8_t word[4] = {0};
    return read_file(reader, word, 4) == 4 ? word[0] | word[1] << 8 | word[2] << 16 | (uint32_t)word[3] << 24 : 0;
}

/* Unpacks the next block; false at the end, or where it is damaged. */
static int next_block(Reader *reader) {
    struct packed *packed = &reader->packed;
    size_t kept = packed->before + packed->end < REACH ? packed->before + packed->end : REACH;
    memmove(packed->out + REACH - kept, packed->out + REACH + packed->end - kept, kept);
    packed->before = kept;
    packed->at = packed->end = 0;
    uint32_t word = read_word(reader);
    size_t size = word & 0x7fffffff;
    if (!size || size > packed->room)
        return 0;
    uint8_t *into = word >> 31 ? packed->out + REACH : packed->in;
    if (read_file(reader, into, size) < size)
        return 0;
    Py_ssize_t made = word >> 31 ? (Py_ssize_t)size : unpack(packed->in, size, packed->out + REACH, kept, packed->room);
    if (packed->sums)
        read_word(reader);
    packed->end = made < 0 ? 0 : (size_t)made;
    return made > 0;
}

static size_t read_some(Reader *reader, uint8_t *into, size_t most) {
    struct packed *packed = &reader->packed;
    if (!packed->room)
        return read_file(reader, into, most);
    if (packed->at == packed->end && !next_block(reader))
        return 0;
    size_t count = packed->end - packed->at < most ? packed->end - packed->at : most;
    memcpy(into, packed->out + REACH + packed->at, count);
    packed->at += count;
    return count;
}

/* Have `size` bytes in the buffer if the capture has as many; false when not. */
static int have(Reader *reader, size_t size) {
    if (reader->end - reader->at >= size)
        return 1;
    if (size > MOST_AT_ONCE)
        return 0;
    memmove(reader->buffer, reader->buffer + reader->at, reader->end - reader->at);
    reader->end -= reader->at;
    reader->at = 0;
    if (size > reader->room) {
        uint8_t *wider = PyMem_RawRealloc(reader->buffer, 2 * size);
        if (!wider)
            return 0;
        reader->buffer = wider;
        reader->room = 2 * size;
    }
    size_t count = 1;
    while (reader->end < size && (count = read_some(reader, reader->buffer + reader->end, reader->room - reader->end)))
        reader->end += count;
    return reader->end >= size;
}

static int bytes(Reader *reader, void *into, size_t size) {
    if (!have(reader, size))
        return 0;
    memcpy(into, reader->buffer + reader->at, size);
    reader->at += size;
    return 1;
}

static int varint(Reader *reader, uint64_t *into) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
        if (reader->at == reader->end && !have(reader, 1))
            return 0;
        uint8_t byte = reader->buffer[reader->at++];
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *into = value;
            return 1;
        }
    }
    return 0;
}

static int signed_varint(Reader *reader, int64_t *into) {
    uint64_t value;
    if (!varint(reader, &value))
        return 0;
    *into = (int64_t)(value >> 1 ^ (0 - (value & 1)));
    return 1;
}

/* What differs from the last of its kind by the number that follows. */
static int difference(Reader *reader, uint64_t *last) {
    int64_t change;
    if (!signed_varint(reader, &change))
        return 0;
    *last += (uint64_t)change;
    return 1;
}

/* The length of the text that begins here, its end mark left out; -1 when it is cut off. */
static Py_ssize_t text(Reader *reader) {
    for (size_t looked_at = 0;;) {
        size_t here = reader->end - reader->at;
        uint8_t *found = here > looked_at ? memchr(reader->buffer + reader->at + looked_at, 0, here - looked_at) : NULL;
        if (found)
            return found - (reader->buffer + reader->at);
        looked_at = here;
        if (!have(reader, here + 1))
            return -1;
    }
}

static PyObject *take_text(Reader *reader) {
    Py_ssize_t size = text(reader);
    if (size < 0)
        return NULL;
    PyObject *result = PyUnicode_DecodeUTF8((char *)reader->buffer + reader->at, size, "surrogateescape");
    reader->at += (size_t)size + 1;
    return result;
}

static int skip_text(Reader *reader) {
    Py_ssize_t size = text(reader);
    if (size < 0)
        return 0;
    reader->at += (size_t)size + 1;
    return 1;
}

/* A list of texts that an empty one ends. */
static int skip_texts(Reader *reader) {
    for (;;) {
        Py_ssize_t size = text(reader);
        if (size < 0)
            return 0;
        reader->at += (size_t)size + 1;
        if (!size)
            return 1;
    }
}

/* --- records ------------------------------------------------------------------------------------------------------------ */

static enum outcome switch_to(Reader *reader) {
    int fresh;
    if (!bytes(reader, &reader->last_thread, 8))
        return ENDED;
    uint32_t number = number_of(&reader->threads, reader->last_thread, &fresh);
    if (!number)
        return no_memory();
    if (fresh) {
        struct thread *thread = append(&reader->thread_list, sizeof *thread);
        if (!thread)
            return no_memory();
        *thread = (struct thread){{NULL, 0, 0}};
    }
    reader->thread = (struct thread *)reader->thread_list.items + number - 1;
    return READ;
}

static uint32_t innermost(const Reader *reader) {
    const struct list *nodes = &reader->thread->nodes;
    return nodes->count ? ((uint32_t *)nodes->items)[nodes->count - 1] : 0;
}

static enum outcome push(Reader *reader, int entry) {
    int fresh;
    struct frame frame = {.entry = entry};
    if (!varint(reader, &frame.code) || !signed_varint(reader, &frame.offset))
        return ENDED;
    if (!reader->thread)
        return damaged("a frame of no thread");
    if (frame.code >> 31 || frame.offset != (int32_t)frame.offset)
        return damaged("a number out of range");
    uint64_t key = frame.code << 33 | (uint64_t)(uint32_t)frame.offset << 1 | (uint64_t)entry;
    uint32_t number = number_of(&reader->frame_numbers, key, &fresh);
    if (fresh) {
        struct frame *kept = append(&reader->frames, sizeof *kept);
        if (!kept)
            return no_memory();
        *kept = frame;
    }
    uint32_t parent = innermost(reader);
    uint32_t node = number ? number_of(&reader->node_numbers, (uint64_t)parent << 32 | number, &fresh) : 0;
    uint32_t *top = node ? append(&reader->thread->nodes, sizeof *top) : NULL;
    if (!top)
        return no_memory();
    *top = node;
    if (fresh) {
        struct node *kept = append(&reader->nodes, sizeof *kept);
        if (!kept)
            return no_memory();
        *kept = (struct node){parent, number};
    }
    return READ;
}

static enum outcome pop(Reader *reader, size_t count) {
    if (!reader->thread || reader->thread->nodes.count < count)
        return damaged("a frame that was not pushed");
    reader->thread->nodes.count -= count;
    return READ;
}

static enum outcome native_frame(Reader *reader) {
    if (!difference(reader, &reader->last_instruction) || !difference(reader, &reader->last_native))
        return ENDED;
    if (reader->last_native > reader->natives.count)
        return damaged("a native frame of no stack");
    struct native *kept = append(&reader->natives, sizeof *kept);
    if (!kept)
        return no_memory();
    *kept = (struct native){reader->last_instruction, reader->last_native};
    return READ;
}

static enum outcome code(Reader *reader) {
    uint64_t number, size, line = (uint64_t)reader->last_line;
    if (!varint(reader, &number))
        return ENDED;
    PyObject *function = take_text(reader), *file = function ? take_text(reader) : NULL, *told = NULL;
    enum outcome outcome = ENDED;
    if (file && difference(reader, &line) && varint(reader, &size) && have(reader, size)) {
        reader->last_line = (int64_t)line;
        told = Py_BuildValue("(OOLy#)", function, file, (long long)reader->last_line,
                             (char *)reader->buffer + reader->at, (Py_ssize_t)size);
        PyObject *key = told ? PyLong_FromUnsignedLongLong(number) : NULL;
        outcome = key && !PyDict_SetItem(reader->codes, key, told) ? READ : FAILED;
        Py_XDECREF(key);
        reader->at += size;
    }
    Py_XDECREF(told);
    Py_XDECREF(file);
    Py_XDECREF(function);
    return PyErr_Occurred() ? FAILED : outcome;
}

static enum outcome mappings(Reader *reader) {
    PyObject *generation = PyList_New(0);
    int failed = !generation || PyList_Append(reader->images, generation);
    Py_XDECREF(generation);
    return failed ? FAILED : READ;
}

static enum outcome image(Reader *reader) {
    uint64_t count, base;
    PyObject *segments = NULL, *told = NULL, *file = take_text(reader);
    if (!file)
        return PyErr_Occurred() ? FAILED : ENDED;
    enum outcome outcome = ENDED;
    if (!varint(reader, &count) || !bytes(reader, &base, 8))
        goto done;
    outcome = FAILED;
    if (!(segments = PyList_New(0)))
        goto done;
    for (uint64_t i = 0; i < count; i++) {
        uint8_t kind;
        uint64_t address, size;
        outcome = ENDED;
        if (!bytes(reader, &kind, 1) || kind != SEGMENT || !bytes(reader, &address, 8) || !varint(reader, &size))
            goto done;
        outcome = FAILED;
        PyObject *segment = Py_BuildValue("(KK)", (unsigned long long)address, (unsigned long long)size);
        int failed = !segment || PyList_Append(segments, segment);
        Py_XDECREF(segment);
        if (failed)
            goto done;
    }
    Py_ssize_t generations = PyList_GET_SIZE(reader->images);
    if (!generations) {
        outcome = damaged("a library of no mapping");
        goto done;
    }
    told = Py_BuildValue("(OKO)", file, (unsigned long long)base, segments);
    if (told && !PyList_Append(PyList_GET_ITEM(reader->images, generations - 1), told))
        outcome = READ;
done:
    Py_XDECREF(told);
    Py_XDECREF(segments);
    Py_DECREF(file);
    return outcome;
}

static int address(Reader *reader, unsigned int place, uint64_t *into) {
    if (place < RECENT) {
        *into = reader->recent[place];
        return 1;
    }
    if (!difference(reader, &reader->last_data))
        return 0;
    *into = reader->last_data << 3;
    memmove(reader->recent + 1, reader->recent, (RECENT - 1) * sizeof *reader->recent);
    reader->recent[0] = *into;
    return 1;
}

static enum outcome object(Reader *reader, unsigned int flags) {
    uint64_t where;
    if (!address(reader, flags >> 1 & 15, &where))
        return ENDED;
    return reader->native && flags & 1 && !difference(reader, &reader->last_native) ? ENDED : READ;
}

/* The number of the stack of an allocation, from 1; 0 for an error. */
static int64_t stack_of(Reader *reader) {
    int fresh;
    uint64_t native = reader->native ? reader->last_native : 0;
    if (native > reader->natives.count || native > UINT32_MAX) {
        damaged("an allocation of no native stack");
        return 0;
    }
    uint32_t node = innermost(reader);
    uint32_t number = number_of(&reader->stack_numbers, (uint64_t)node << 32 | native, &fresh);
    if (fresh) {
        struct stack *kept = append(&reader->stacks, sizeof *kept);
        if (!kept)
            number = 0;
        else
            *kept = (struct stack){node, (uint32_t)PyList_GET_SIZE(reader->images), native, reader->last_thread};
    }
    if (!number)
        PyErr_NoMemory();
    return number;
}

static enum outcome allocation(Reader *reader, unsigned int flags, int64_t *row, int64_t smallest) {
    uint64_t where, size = 0;
    uint8_t allocator = flags & 7;
    if (!address(reader, flags >> 3 & 15, &where) || (!allocator && !bytes(reader, &allocator, 1)))
        return ENDED;
    int frees = allocator == FREE || allocator == PYMALLOC_FREE;
    if (!frees && ((reader->native && !difference(reader, &reader->last_native)) || !varint(reader, &size)))
        return ENDED;
    if (!reader->thread)
        return damaged("an allocation of no thread");
    reader->found++;
    row[0] = (int64_t)reader->last_thread;
    row[1] = (int64_t)where;
    row[2] = (int64_t)size;
    row[3] = allocator;
    row[4] = 0;
    if (!frees && allocator != MUNMAP && row[2] >= smallest && !(row[4] = stack_of(reader)))
        return FAILED;
    return READ;
}

/* Reads one record; `rows` counts those of allocations. */
static enum outcome record(Reader *reader, int64_t *row, int64_t smallest, Py_ssize_t *rows) {
    have(reader, MOST_FIXED);
    if (reader->at == reader->end)
        return ENDED;
    unsigned int kind = reader->buffer[reader->at++];
    uint64_t ignored;
    if (kind & ALLOCATION) {
        enum outcome outcome = allocation(reader, kind & (ALLOCATION - 1), row, smallest);
        *rows += outcome == READ;
        return outcome;
    }
    if (kind & PUSH)
        return push(reader, kind & 1);
    if (kind & OBJECT)
        return object(reader, kind & (OBJECT - 1));
    if (kind & POP)
        return pop(reader, (kind & (POP - 1)) + 1);
    switch (kind) {
    case FILLER:
        return READ;
    case TRAILER:
        if (reader->expected && reader->found != reader->expected)
            return damaged("not as many allocations as it says");
        reader->complete = 1;
        return ENDED;
    case MEMORY:
        return varint(reader, &ignored) && varint(reader, &ignored) ? READ : ENDED;
    case NATIVE_FRAME:
        return native_frame(reader);
    case MAPPINGS:
        return mappings(reader);
    case IMAGE:
        return image(reader);
    case THREAD_NAME:
        return skip_text(reader) ? READ : ENDED;
    case THREAD:
        return switch_to(reader);
    case CODE:
        return code(reader);
    default:
        return damaged("a record of an unknown kind");
    }
}

/* --- the type ----------------------------------------------------------------------------------------------------------- */

/* What the file holds, without the zeros after the last record of a process that was killed. */
static int64_t written(int descriptor) {
    uint8_t block[1 << 12];
    struct stat status;
    if (fstat(descriptor, &status))
        return -1;
    for (int64_t end = status.st_size; end > 0;) {
        int64_t begin = (end - 1) & ~(int64_t)(sizeof block - 1);
        ssize_t count = pread(descriptor, block, (size_t)(end - begin), begin);
        if (count < 0)
            return -1;
        for (ssize_t i = count; i > 0; i--)
            if (block[i - 1])
                return begin + i;
        end = begin;
    }
    return 0;
}

/* Whether what begins here is packed, which the head of the frame tells; -1 when it cannot be unpacked. */
static int begin_packed(Reader *reader) {
    uint8_t head[4 + 2 + 8 + 1];
    if (pread(reader->descriptor, head, 6, 0) < 6 || memcmp(head, "\x04\x22\x4d\x18", 4))
        return 0;
    size_t block = (size_t)1 << (8 + 2 * (head[5] >> 4 & 7)), size = head[4] & 8 ? 15 : 7;
    struct stat status;
    if (head[4] >> 6 != 1 || head[4] & 1 || block < 1 << 16 || fstat(reader->descriptor, &status))
        return -1;
    reader->unread = (uint64_t)status.st_size;
    reader->packed.sums = head[4] >> 4 & 1;
    reader->packed.in = PyMem_RawMalloc(block);
    reader->packed.out = PyMem_RawMalloc(REACH + block);
    reader->packed.room = block;
    return reader->packed.in && reader->packed.out && read_file(reader, head, size) == size ? 1 : -1;
}

static int header(Reader *reader) {
    char magic[7];
    int version, pid;
    uint8_t native, format, flags[3];
    struct {
        uint64_t allocations, frames;
        int64_t started, ended;
    } counts;
    if (!bytes(reader, magic, sizeof magic) || memcmp(magic, "memray", 7) || !bytes(reader, &version, 4))
        return 0;
    if (version != VERSION || !bytes(reader, &reader->python_version, 4) || !bytes(reader, &native, 1) ||
        !bytes(reader, &format, 1) || format || !bytes(reader, &counts, sizeof counts) || !skip_text(reader) ||
        !bytes(reader, &pid, 4) || !bytes(reader, &reader->main_thread, 8) || !bytes(reader, &reader->skipped, 8) ||
        !bytes(reader, flags, 3) || !skip_text(reader) || !skip_texts(reader) || !skip_texts(reader))
        return 0;
    reader->native = native;
    reader->expected = counts.allocations;
    return 1;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *path;
    if (keywords && PyDict_GET_SIZE(keywords)) {
        PyErr_SetString(PyExc_TypeError, "Reader takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O&:Reader", PyUnicode_FSConverter, &path))
        return NULL;
    Reader *reader = (Reader *)type->tp_alloc(type, 0);
    if (!reader) {
        Py_DECREF(path);
        return NULL;
    }
    reader->descriptor = open(PyBytes_AS_STRING(path), O_RDONLY | O_CLOEXEC);
    int64_t size = reader->descriptor < 0 ? -1 : written(reader->descriptor);
    if (size < 0) {
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(path));
        goto failed;
    }
    reader->unread = (uint64_t)size;
    reader->room = 1 << 20;
    reader->buffer = PyMem_RawMalloc(reader->room);
    reader->codes = PyDict_New();
    reader->images = PyList_New(0);
    if (!reader->buffer || !reader->codes || !reader->images) {
        PyErr_NoMemory();
        goto failed;
    }
    if (begin_packed(reader) < 0 || !header(reader)) {
        PyErr_SetString(PyExc_NotImplementedError, "no capture of the format that is read here");
        goto failed;
    }
    Py_DECREF(path);
    return (PyObject *)reader;
failed:
    Py_DECREF(path);
    Py_DECREF(reader);
    return NULL;
}

static void reader_dealloc(Reader *reader) {
    if (reader->descriptor >= 0)
        close(reader->descriptor);
    for (size_t i = 0; i < reader->thread_list.count; i++)
        PyMem_RawFree(((struct thread *)reader->thread_list.items)[i].nodes.items);
    struct list *lists[] = {&reader->thread_list, &reader->frames, &reader->nodes, &reader->natives, &reader->stacks};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++)
        PyMem_RawFree(lists[i]->items);
    struct numbers *maps[] = {&reader->threads, &reader->frame_numbers, &reader->node_numbers, &reader->stack_numbers};
    for (size_t i = 0; i < sizeof maps / sizeof *maps; i++) {
        PyMem_RawFree(maps[i]->keys);
        PyMem_RawFree(maps[i]->values);
    }
    PyMem_RawFree(reader->buffer);
    PyMem_RawFree(reader->packed.in);
    PyMem_RawFree(reader->packed.out);
    Py_XDECREF(reader->codes);
    Py_XDECREF(reader->images);
    Py_TYPE(reader)->tp_free((PyObject *)reader);
}

static PyObject *reader_take(Reader *reader, PyObject *args) {
    Py_ssize_t count, taken = 0;
    long long smallest;
    if (!PyArg_ParseTuple(args, "nL:take", &count, &smallest))
        return NULL;
    if (count < 0 || count > PY_SSIZE_T_MAX / (COLUMNS * 8)) {
        PyErr_SetString(PyExc_ValueError, "count: give how many records to take, from 0 up");
        return NULL;
    }
    PyObject *rows = PyBytes_FromStringAndSize(NULL, count * COLUMNS * (Py_ssize_t)sizeof(int64_t));
    if (!rows)
        return NULL;
    int64_t *row = (int64_t *)(void *)PyBytes_AS_STRING(rows);
    while (taken < count && !reader->ended) {
        enum outcome outcome = record(reader, row + taken * COLUMNS, smallest, &taken);
        if (outcome == ENDED && reader->packed.room && !reader->complete && !PyErr_Occurred())
            outcome = damaged("cut off"); /* it was packed when it was complete */
        if (outcome == FAILED) {
            Py_DECREF(rows);
            return NULL;
        }
        reader->ended = outcome == ENDED;
    }
    _PyBytes_Resize(&rows, taken * COLUMNS * (Py_ssize_t)sizeof(int64_t));
    return rows;
}

/* The Python frames of a stack, innermost first. */
static PyObject *python_frames(const Reader *reader, uint32_t node) {
    PyObject *result = PyList_New(0);
    while (result && node) {
        struct node *at = (struct node *)reader->nodes.items + node - 1;
        struct frame *frame = (struct frame *)reader->frames.items + at->frame - 1;
        PyObject *told = Py_BuildValue("(KLO)", (unsigned long long)frame->code, (long long)frame->offset,
                                       frame->entry ? Py_True : Py_False);
        if (!told || PyList_Append(result, told))
            Py_CLEAR(result);
        Py_XDECREF(told);
        node = at->parent;
    }
    return result;
}

/* The return addresses of a stack, innermost first. A frame names one before it, so that this ends. */
static PyObject *native_frames(const Reader *reader, uint64_t number) {
    PyObject *result = PyList_New(0);
    while (result && number) {
        struct native *at = (struct native *)reader->natives.items + number - 1;
        PyObject *told = PyLong_FromUnsignedLongLong(at->address);
        if (!told || PyList_Append(result, told))
            Py_CLEAR(result);
        Py_XDECREF(told);
        number = at->parent;
    }
    return result;
}

static PyObject *reader_stack(Reader *reader, PyObject *args) {
    Py_ssize_t number;
    if (!PyArg_ParseTuple(args, "n:stack", &number))
        return NULL;
    if (number < 1 || (size_t)number > reader->stacks.count) {
        PyErr_SetString(PyExc_IndexError, "no stack of that number");
        return NULL;
    }
    const struct stack *stack = (struct stack *)reader->stacks.items + number - 1;
    PyObject *python = python_frames(reader, stack->node);
    PyObject *native = python ? native_frames(reader, stack->native) : NULL;
    if (!native) {
        Py_XDECREF(python);
        return NULL;
    }
    return Py_BuildValue("(NNkK)", python, native, (unsigned long)stack->generation,
                         (unsigned long long)stack->thread);
}

static PyMethodDef reader_methods[] = {
    {"take", (PyCFunction)reader_take, METH_VARARGS,
     "take(count, smallest) -> bytes: the next records of allocations as rows of five int64 (thread, address, size,\n"
     "allocator, number of the stack from 1 where size is at least smallest); empty at the end"},
    {"stack", (PyCFunction)reader_stack, METH_VARARGS,
     "stack(number) -> (Python frames, return addresses, generation of the images from 1, thread), innermost first;\n"
     "a Python frame is (number of its code, offset of its instruction, whether it began an evaluation)"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"native", T_INT, offsetof(Reader, native), READONLY, "whether it has native stacks"},
    {"python_version", T_INT, offsetof(Reader, python_version), READONLY, "PY_VERSION_HEX of the traced process"},
    {"main_thread", T_ULONGLONG, offsetof(Reader, main_thread), READONLY, "the thread that began the capture"},
    {"skipped", T_ULONGLONG, offsetof(Reader, skipped), READONLY, "Python frames of it above the one that began it"},
    {"codes", T_OBJECT, offsetof(Reader, codes), READONLY, "number -> (function, file, first line, line table)"},
    {"images", T_OBJECT, offsetof(Reader, images), READONLY, "generations: lists of (file, base, [(address, size)])"},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject reader_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "copytrace._captures.Reader",
    .tp_basicsize = sizeof(Reader),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Reader(path): reads a memray capture; NotImplementedError when it is of another format.",
    .tp_new = reader_new,
    .tp_dealloc = (destructor)reader_dealloc,
    .tp_methods = reader_methods,
    .tp_members = reader_members,
};

static int populate(PyObject *module) {
    return PyModule_AddType(module, &reader_type);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, populate}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "copytrace._captures",
    .m_size = 0,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__captures(void) {
    return PyModuleDef_Init(&definition);
}
