// One program for all of a control plane and its node: which one it is, is the name it was called by.
// Apart they are 384 MB and four more links; together 133 MB.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	_ "time/tzdata" // time zones of CronJobs

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllers.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubeletCommand(kubelet.NewKubeletCommand) },
}

// The kubelet's constructor takes no context in the older versions.
func kubeletCommand(constructor any) *cobra.Command {
	if withContext, ok := constructor.(func(context.Context) *cobra.Command); ok {
		return withContext(context.Background())
	}
	return constructor.(func() *cobra.Command)()
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == "etcd" {
		etcdmain.Main(os.Args)
		return
	}
	command, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "called as %q: not the name of a Kubernetes component\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(command()))
}
