#define _GNU_SOURCE
#include <fcntl.h>

#include "kernel.h"
#include "spawner.h"

int new_mount(const char *type, unsigned attributes, const mount_option *options)
{
	auto_close int fs = sys_fsopen(type);

	TRY(fs);
	for (; options && (*options)[0]; options++)
		TRY(sys_fsset(fs, (*options)[0], (*options)[1]));
	return sys_fsmount(fs, attributes);
}

NEVER_RETURNS int execute_self(const char *name)
{
	const char *const argv[] = {name, NULL}, *const env[] = {NULL};

	TRY(sys_close_range(SLOT_END, ~0u, CLOSE_UNSHARE));
	/* 1 is /dev/null. Something has to lie at 0 to 2, and stay there: see init_main. */
	TRY((int)raw(dup3, 1, 0, 0));
	TRY((int)raw(dup3, 1, 2, 0));
	TRY((int)raw(dup3, SLOT_CHANNEL, CHANNEL, 0));
	TRY((int)raw(dup3, SLOT_PROGRAM, CHANNEL + 1, O_CLOEXEC));
	TRY(sys_close_range(CHANNEL + 2, ~0u, 0));
	return (int)raw(execveat, CHANNEL + 1, "", argv, env, EMPTY_PATH);
}

/* ASan must not watch a frame that two processes return into. */
__attribute__((noinline, no_sanitize("address"))) long
clone_onto_stack(struct clone_args *args, int (*fn)(void *), void *arg)
{
#if defined(__x86_64__)
	register long result __asm__("rax") = SYS_clone3;
	register struct clone_args *r_args __asm__("rdi") = args;
	register unsigned long r_size __asm__("rsi") = sizeof(*args);
	register int (*r_fn)(void *) __asm__("r12") = fn;
	register void *r_arg __asm__("r13") = arg;

	__asm__ volatile("syscall\n\t"
			 "testq %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xorl %%ebp, %%ebp\n\t"
			 "movq %%r13, %%rdi\n\t"
			 "callq *%%r12\n\t"
			 "movl %%eax, %%edi\n\t"
			 "movl $60, %%eax\n\t"
			 "syscall\n\t"
			 "hlt\n"
			 "1:\n\t"
			 : "+r"(result)
			 : "r"(r_args), "r"(r_size), "r"(r_fn), "r"(r_arg)
			 : "rcx", "r11", "memory", "cc");
	return result;
#elif defined(__aarch64__)
	register long number __asm__("x8") = SYS_clone3;
	register long result __asm__("x0") = (long)args;
	register unsigned long r_size __asm__("x1") = sizeof(*args);
	register int (*r_fn)(void *) __asm__("x10") = fn;
	register void *r_arg __asm__("x11") = arg;

	__asm__ volatile("svc #0\n\t"
			 "cbnz x0, 1f\n\t"
			 "mov x29, #0\n\t"
			 "mov x0, x11\n\t"
			 "blr x10\n\t"
			 "mov x8, #93\n\t"
			 "svc #0\n\t"
			 "brk #1\n"
			 "1:\n\t"
			 : "+r"(result)
			 : "r"(number), "r"(r_size), "r"(r_fn), "r"(r_arg)
			 : "memory", "cc");
	return result;
#else
#error "only x86-64 and aarch64 are supported"
#endif
}
