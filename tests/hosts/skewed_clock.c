/* A clock that is ahead by CLOCK_AHEAD_S seconds (behind, where negative), for every process that preloads this library. It jumps when
   the number in the file PYTHON_CLOCK_FILE changes.

   What a process reads of the time of day is later by that, and every moment of the time of day that it hands back to the kernel or to
   glibc, as the end of a wait, is earlier by that: the process sees what it would see on a host whose clock is wrong. Clocks that count
   from the start of the machine are as they were. Times of files are the machine's own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

/* Clocks that count from the machine's start are far from this, the time of day (2001 and later) is beyond it. */
#define EPOCH_S 1000000000

static void *real(void **found, const char *name, const char *version) {
    if (*found == NULL) {
        void *symbol = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
        *found = symbol ? symbol : dlsym(RTLD_NEXT, name);
    }
    return *found;
}

#define REAL(name, version) \
    static void *found_##name; \
    __typeof__(&name) true_##name = (__typeof__(&name))real(&found_##name, #name, version)

static int of_day(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI; }

/* What the file says, read anew every 20 ms. */
static long said_s(const char *path) {
    static long value, read_at;
    REAL(clock_gettime, NULL);
    struct timespec now;
    true_clock_gettime(CLOCK_MONOTONIC, &now);
    long now_ms = now.tv_sec * 1000 + now.tv_nsec / 1000000;
    if (now_ms - read_at < 20)
        return value;
    read_at = now_ms;
    char text[32];
    int before = errno, file = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0)
        close(file);
    errno = before;
    if (length > 0) {
        text[length] = 0;
        value = atol(text);
    }
    return value;
}

static long ahead_s(void) {
    static long value;
    static const char *path;
    static int known;
    if (!known) {
        const char *text = getenv("CLOCK_AHEAD_S");
        value = text ? atol(text) : 0;
        path = getenv("PYTHON_CLOCK_FILE");
        known = 1;
    }
    return path ? said_s(path) : value;
}

/* The kernel's word for a moment of this process's, where it is one of the time of day. */
static const struct timespec *true_time(const struct timespec *moment, struct timespec *room) {
    if (moment == NULL || moment->tv_sec < EPOCH_S)
        return moment;
    *room = *moment;
    room->tv_sec -= ahead_s();
    return room;
}

/* -- reading ------------------------------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime, NULL);
    int failed = true_clock_gettime(clock, now);
    if (!failed && of_day(clock))
        now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(gettimeofday, NULL);
    int failed = true_gettimeofday(now, zone);
    if (!failed)
        now->tv_sec += ahead_s();
    return failed;
}

time_t time(time_t *room) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (room)
        *room = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base) { return clock_gettime(CLOCK_REALTIME, now) ? 0 : base; }

/* -- waiting until a moment ------------------------------------------------------------------------------------------------------ */

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    REAL(clock_nanosleep, NULL);
    struct timespec room;
    return true_clock_nanosleep(clock, flags, flags & TIMER_ABSTIME ? true_time(until, &room) : until, left);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    REAL(pthread_cond_timedwait, "GLIBC_2.3.2");
    struct timespec room;
    return true_pthread_cond_timedwait(cond, mutex, true_time(until, &room));
}

int pthread_cond_clockwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict until) {
    REAL(pthread_cond_clockwait, NULL);
    struct timespec room;
    return true_pthread_cond_clockwait(cond, mutex, clock, true_time(until, &room));
}

/* A function of glibc that waits for ``what`` until a moment. */
#define WAITS_UNTIL(name, type)                                              \
    int name(type *restrict what, const struct timespec *restrict until) {   \
        REAL(name, NULL);                                                    \
        struct timespec room;                                                \
        return true_##name(what, true_time(until, &room));                   \
    }

WAITS_UNTIL(pthread_mutex_timedlock, pthread_mutex_t)
WAITS_UNTIL(pthread_rwlock_timedrdlock, pthread_rwlock_t)
WAITS_UNTIL(pthread_rwlock_timedwrlock, pthread_rwlock_t)
WAITS_UNTIL(sem_timedwait, sem_t)

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict until) {
    REAL(sem_clockwait, NULL);
    struct timespec room;
    return true_sem_clockwait(semaphore, clock, true_time(until, &room));
}

int timerfd_settime(int timer, int flags, const struct itimerspec *next, struct itimerspec *previous) {
    REAL(timerfd_settime, NULL);
    struct itimerspec first = *next;
    struct timespec room;
    if (flags & TFD_TIMER_ABSTIME)
        first.it_value = *true_time(&next->it_value, &room);
    return true_timerfd_settime(timer, flags, &first, previous);
}

/* Some libraries (Abseil, which Ray's processes wait with) call the kernel past glibc. */
long syscall(long number, ...) {
    static void *found;
    long (*true_syscall)(long, ...) = (long (*)(long, ...))real(&found, "syscall", NULL);
    struct timespec room;
    long words[6];
    va_list given;
    va_start(given, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(given, long);
    va_end(given);
    if (number == SYS_clock_gettime)
        return clock_gettime((clockid_t)words[0], (struct timespec *)words[1]);
    long what = words[1] & FUTEX_CMD_MASK;
    if (number == SYS_futex && (what == FUTEX_WAIT_BITSET || what == FUTEX_LOCK_PI))
        words[3] = (long)true_time((const struct timespec *)words[3], &room);
    return true_syscall(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
