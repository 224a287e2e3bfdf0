/* Preloaded into a peer, it makes the processor deny instruction sets, so that every library chooses
   as it would on a smaller machine, also one that has no variable for it.

   The kernel can make the instruction `cpuid` fault; it is then done here, and the bits named in
   SPECBATCH_BENCH_CPUID are taken out of leaf 7: "ebx ecx edx", then "eax" of its subleaf 1, as
   hexadecimal masks. Where the kernel or the processor cannot, nothing is changed and
   `specbatch_cpuid_limited` says 0. The C library looks before this is loaded: it has GLIBC_TUNABLES. */

#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

static unsigned denied_ebx, denied_ecx, denied_edx, denied_eax1;
static int limited;

int specbatch_cpuid_limited(void) { return limited; }

/* The C library's own name for it. A library that handles faults, to print where they were, would
   take our handler away: both ways to set one say that they did it, and leave ours. */
extern int __sigaction(int number, const struct sigaction *wanted, struct sigaction *before);

int sigaction(int number, const struct sigaction *wanted, struct sigaction *before) {
    return __sigaction(number, number == SIGSEGV && limited ? NULL : wanted, before);
}

__sighandler_t signal(int number, __sighandler_t handler) {
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
    return sigaction(number, &wanted, &before) ? SIG_ERR : before.sa_handler;
}

static long allow(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, allowed); }

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {
        struct sigaction end = {.sa_handler = SIG_DFL};
        __sigaction(number, &end, NULL); /* a real fault comes again at once, and ends the process */
        return;
    }
    unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
    unsigned a, b, c, d;
    allow(1);
    __asm__ volatile("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(leaf), "c"(subleaf));
    allow(0);
    if (leaf == 7 && subleaf == 0) {
        b &= ~denied_ebx;
        c &= ~denied_ecx;
        d &= ~denied_edx;
    }
    if (leaf == 7 && subleaf == 1) a &= ~denied_eax1;
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    const char *masks = getenv("SPECBATCH_BENCH_CPUID");
    unsetenv("LD_PRELOAD"); /* a compiler that the peer starts has a handler of its own */
    if (!masks ||
        sscanf(masks, "%x %x %x %x", &denied_ebx, &denied_ecx, &denied_edx, &denied_eax1) != 4)
        return;
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    if (__sigaction(SIGSEGV, &action, NULL) == 0) limited = allow(0) == 0;
}
