/* The Python module copytrace._rows: memray's records as rows of numbers, without asking each for its attributes. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

enum { THREAD, ADDRESS, SIZE, ALLOCATOR, STACK_ID, NATIVE_STACK_ID = 6, FIELDS = 8, COLUMNS = 5 };
enum { FREE = 5, MUNMAP = 15 };

static int find_tuple(PyObject *object, void *found) {
    if (!PyTuple_CheckExact(object))
        return 0;
    *(PyObject **)found = object;
    return 1;
}

/* The tuple in which memray holds a record; borrowed. */
static PyObject *fields_of(PyObject *record) {
    PyObject *found = NULL;
    if (Py_TYPE(record)->tp_traverse)
        Py_TYPE(record)->tp_traverse(record, find_tuple, &found);
    if (found && PyTuple_GET_SIZE(found) == FIELDS)
        return found;
    PyErr_SetString(PyExc_TypeError, "a record that is no tuple of eight");
    return NULL;
}

/* The number of the record's stack; a record with a new one is kept. 0 for an error. */
static long long number_of_stack(PyObject *record, uint64_t key, PyObject *known, PyObject *kept) {
    long long number = 0;
    PyObject *name = PyLong_FromUnsignedLongLong(key), *value = NULL;
    if (!name)
        return 0;
    PyObject *old = PyDict_GetItemWithError(known, name);
    if (old) {
        number = PyLong_AsLongLong(old);
    } else if (!PyErr_Occurred() && !PyList_Append(kept, record)) {
        value = PyLong_FromSsize_t(PyList_GET_SIZE(kept));
        if (value && !PyDict_SetItem(known, name, value))
            number = PyList_GET_SIZE(kept);
    }
    Py_XDECREF(value);
    Py_DECREF(name);
    return number;
}

static int fill(int64_t *row, PyObject *record, int64_t smallest, PyObject *known, PyObject *kept) {
    PyObject *fields = fields_of(record);
    if (!fields)
        return -1;
    for (int column = THREAD; column <= ALLOCATOR; column++)
        row[column] = PyLong_AsLongLong(PyTuple_GET_ITEM(fields, column));
    row[STACK_ID] = 0;
    if (row[SIZE] >= smallest && row[ALLOCATOR] != FREE && row[ALLOCATOR] != MUNMAP) {
        uint64_t key = (uint64_t)PyLong_AsLongLong(PyTuple_GET_ITEM(fields, STACK_ID)) << 32 |
                       (uint64_t)PyLong_AsLongLong(PyTuple_GET_ITEM(fields, NATIVE_STACK_ID));
        row[STACK_ID] = number_of_stack(record, key, known, kept);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *take(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *records, *known, *kept;
    Py_ssize_t count;
    long long smallest;
    if (!PyArg_ParseTuple(args, "OnLO!O!:take", &records, &count, &smallest, &PyDict_Type, &known, &PyList_Type, &kept))
        return NULL;
    if (!PyIter_Check(records) || count < 0) {
        PyErr_SetString(PyExc_TypeError, "take(iterator, count from 0 up, smallest, dict, list)");
        return NULL;
    }
    PyObject *rows = PyBytes_FromStringAndSize(NULL, count * COLUMNS * (Py_ssize_t)sizeof(int64_t));
    if (!rows)
        return NULL;
    int64_t *row = (int64_t *)(void *)PyBytes_AS_STRING(rows);
    Py_ssize_t taken = 0;
    PyObject *record;
    while (taken < count && (record = PyIter_Next(records))) {
        int failed = fill(row + taken * COLUMNS, record, smallest, known, kept);
        Py_DECREF(record);
        if (failed)
            break;
        taken++;
    }
    if (PyErr_Occurred()) {
        Py_DECREF(rows);
        return NULL;
    }
    _PyBytes_Resize(&rows, taken * COLUMNS * (Py_ssize_t)sizeof(int64_t));
    return rows;
}

static PyMethodDef methods[] = {
    {"take", take, METH_VARARGS,
     "take(records, count, smallest, known, kept) -> bytes: rows of five int64 (thread, address, size, allocator, stack)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "copytrace._rows",
    .m_size = 0,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__rows(void) {
    return PyModuleDef_Init(&definition);
}
