/* The Python module copytrace._transfers. Python's lock makes start, stop and mark follow one another. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_transfers.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

enum { MARK_ADDRESS = 8, MARK_COUNT = 1 << 20, SETTLE_ROUNDS = 20 };

static enum { IDLE, OPEN, CLOSING } state;
static int hooking;      /* the session records moves */
static int markers;      /* marks are made for memray, too */
static int patching;     /* a thread waits for the loader without Python's lock */
static uint64_t changes; /* of state */

static void become(int next) {
    state = next;
    changes++;
}

static void start_anew(void) {
    become(IDLE);
    patching = 0;
}

/* When the loader does not stand still, the next mark tries again. */
static void patch_objects(int first) {
    uint64_t before = changes;
    patching = 1;
    for (int round = 0; round < SETTLE_ROUNDS; round++) {
        Py_BEGIN_ALLOW_THREADS
        copytrace_slots_settle();
        Py_END_ALLOW_THREADS
        if (changes != before || !copytrace_slots_patch(first))
            break;
    }
    patching = 0;
}

static PyObject *start(PyObject *module, PyObject *args, PyObject *keywords) {
    static char *names[] = {"directory", "moves", "min_bytes", "row_bits", "segments", NULL};
    (void)module;
    PyObject *directory;
    int moves = 1, row_bits = 15;
    unsigned long long min_bytes = 4096;
    Py_ssize_t segments = MAX_SEGMENTS;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O&|pKin:start", names, PyUnicode_FSConverter, &directory, &moves,
                                     &min_bytes, &row_bits, &segments))
        return NULL;
    if (state != IDLE || patching) {
        Py_DECREF(directory);
        PyErr_SetString(PyExc_RuntimeError, "this process is being recorded already");
        return NULL;
    }
    int error = copytrace_record_open(PyBytes_AS_STRING(directory), min_bytes, (unsigned)row_bits, (size_t)segments);
    if (error) {
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, PyBytes_AS_STRING(directory));
        Py_DECREF(directory);
        return NULL;
    }
    Py_DECREF(directory);
    become(OPEN);
    hooking = moves;
    markers = 0;
    if (moves)
        patch_objects(1);
    return PyLong_FromSize_t(copytrace_slots_patched());
}

static PyObject *stop(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    struct totals totals = {0, 0, 0, 0};
    size_t patched = copytrace_slots_patched();
    if (state == OPEN) {
        int ours = copytrace_record_end();
        become(CLOSING);
        copytrace_slots_restore();
        if (ours) {
            Py_BEGIN_ALLOW_THREADS
            totals = copytrace_record_close();
            Py_END_ALLOW_THREADS
        }
        become(IDLE);
    } else if (state == IDLE)
        copytrace_slots_restore(); /* a forked child may put back its own */
    return Py_BuildValue("{sKsKsKsKsn}", "moves", totals.moves, "lost", totals.lost, "marks", totals.marks, "lost_marks",
                         totals.lost_marks, "slots", (Py_ssize_t)patched);
}

static uint64_t take_mark(uint64_t span) {
    uint64_t count = 0;
    if (state == OPEN && hooking && !patching && copytrace_slots_stale())
        patch_objects(0);
    uint64_t sequence = copytrace_mark(span, &count);
    if (!sequence)
        return copytrace_sequence();
    if (markers) { /* memray notes the end of a mapping before the kernel refuses it, and takes no stack for that */
        int error = errno;
        munmap((void *)MARK_ADDRESS, 1 + count % MARK_COUNT);
        errno = error;
    }
    return sequence;
}

static PyObject *mark(PyObject *module, PyObject *argument) {
    (void)module;
    uint64_t span = PyLong_AsUnsignedLongLong(argument);
    if (span == (uint64_t)-1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(take_mark(span));
}

static PyObject *set_markers(PyObject *module, PyObject *on) {
    (void)module;
    int value = PyObject_IsTrue(on);
    if (value < 0)
        return NULL;
    markers = value;
    return PyLong_FromUnsignedLongLong(copytrace_marks());
}

static PyObject *sequence(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong(copytrace_sequence());
}

static void append_slot(void *list, const char *object, const char *symbol, uintptr_t address, uintptr_t value) {
    if (PyErr_Occurred())
        return;
    PyObject *row = Py_BuildValue("(ssKK)", object, symbol, (unsigned long long)address, (unsigned long long)value);
    if (row)
        PyList_Append(list, row);
    Py_XDECREF(row);
}

static PyObject *slots(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    if (!list)
        return NULL;
    copytrace_slots_visit(append_slot, list);
    if (PyErr_Occurred())
        Py_CLEAR(list);
    return list;
}

static PyMethodDef methods[] = {
    {"start", (PyCFunction)(void (*)(void))start, METH_VARARGS | METH_KEYWORDS,
     "start(directory, moves=True, min_bytes=4096, row_bits=15, segments=65536) -> slots patched"},
    {"stop", stop, METH_NOARGS, "stop() -> {moves, lost, marks, lost_marks, slots}"},
    {"mark", mark, METH_O, "mark(span) -> its sequence"},
    {"set_markers", set_markers, METH_O, "set_markers(on) -> how many marks there were: the next also unmap what nobody can have mapped"},
    {"sequence", sequence, METH_NOARGS, "sequence() -> the last one taken"},
    {"slots", slots, METH_NOARGS, "slots() -> [(object, symbol, address, value)] as they are now"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_transfers", "Records the moves of bytes of this process.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__transfers(void) {
    Dl_info info;
    int error = copytrace_record_initialise();
    if (!error)
        error = pthread_atfork(NULL, NULL, start_anew);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    /* Hooks may be left in a thread or in a copied pointer: we stay. */
    if (!dladdr((void *)&PyInit__transfers, &info) || !dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE))
        return PyErr_Format(PyExc_ImportError, "%s", dlerror());
    copytrace_hooks_initialise();
    copytrace_slots_initialise();
    PyObject *module = PyModule_Create(&definition);
    PyObject *directly = module ? PyCapsule_New((void *)take_mark, "copytrace._transfers.take_mark", NULL) : NULL;
    if (!directly || PyModule_AddObjectRef(module, "take_mark", directly))
        Py_CLEAR(module);
    Py_XDECREF(directly);
    return module;
}
